"""A model that is no folder here and that the hub cannot be asked for: said at once, in one line.

vLLM takes any name of two words for one of the hub's, asks five times, and says nothing of folders.
"""

import socket
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from huggingface_hub import constants
from vllm import envs

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

_CONNECT_SECONDS = 3.0


def check_models(arguments: "EngineArgs") -> None:
    """Raises ValueError when the model, or the drafter, is nowhere to be found."""
    check_model(arguments.model)
    drafter = (arguments.speculative_config or {}).get("model")
    if isinstance(drafter, str):
        check_model(drafter)


def check_model(model: str) -> None:
    """Raises ValueError when `model` is neither here nor on a hub that answers."""
    path = Path(model).expanduser()
    if path.exists() or "://" in model or envs.VLLM_USE_MODELSCOPE:
        return
    if path.is_absolute() or model.startswith(("./", "../", "~")) or len(path.parts) > 2:
        raise ValueError(
            f"There is no model '{path}': no such folder ({_instead(path)}). Name the folder of a "
            f"checkpoint."
        )
    if _is_cached(model) or _hub_answers():
        return
    raise ValueError(
        f"There is no model '{path}': no such folder ({_instead(path)}), nor does "
        f"{constants.ENDPOINT} answer, where models of other names are. Name the folder of a "
        f"checkpoint, or connect this machine to the network."
    )


def _instead(path: Path) -> str:
    """What there is where the folder was expected."""
    if not path.parent.is_dir():
        return f"there is no '{path.parent}' either"
    names = sorted(config.parent.name for config in path.parent.glob("*/config.json"))
    return f"'{path.parent}' has {', '.join(names) if names else 'no checkpoints'}"


def _is_cached(model: str) -> bool:
    """Whether something of it was downloaded before; vLLM knows best what it needs."""
    return (Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").is_dir()


def _hub_answers() -> bool:
    """Whether the hub's machine takes connections; behind a proxy only the attempt would tell."""
    address = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {address.scheme, "all"}:
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
