"""Says early, and in plain words, what the model hub will not give.

vLLM and huggingface_hub ask a hub that does not answer for minutes, also for a model that was
downloaded before, and their errors do not name the hub.
"""

import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

_CONNECT_SECONDS = 3.0


def is_cached(name: str) -> bool:
    """Whether the hub's cache has the model `name`, or a part of it."""
    return (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()


def answers() -> bool:
    """Whether the hub may be asked, and its host takes connections in `_CONNECT_SECONDS` or there
    is a proxy."""
    if constants.HF_HUB_OFFLINE:
        return False
    address = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {address.scheme, "all"}:
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def why_not() -> str:
    """Returns why the hub has no model, as a part of a sentence."""
    if constants.HF_HUB_OFFLINE:
        return f"{constants.HF_HUB_CACHE} does not have it, and HF_HUB_OFFLINE is set"
    return f"the model hub at {constants.ENDPOINT} does not answer"


def describe_error(error: BaseException) -> str | None:
    """Returns what to say of an error of the hub's library that means that a model is neither in
    the cache, at least not all of it, nor can be downloaded. Returns None for other errors."""
    if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError):
        return (
            f"{constants.HF_HUB_CACHE} does not have the model, or not all of it, and "
            f"HF_HUB_OFFLINE is set. Name the folder of a checkpoint, or unset it and connect this "
            f"machine to the network."
        )
    # An error of the HTTP client, whose package has other names in other versions.
    request, answer = getattr(error, "_request", None), getattr(error, "response", None)
    if request is not None and answer is None and str(request.url).startswith(constants.ENDPOINT):
        return (
            f"The model hub at {constants.ENDPOINT} does not answer. Name the folder of a "
            f"checkpoint, connect this machine to the network or, if the model was downloaded "
            f"before, set HF_HUB_OFFLINE=1."
        )
    return None
