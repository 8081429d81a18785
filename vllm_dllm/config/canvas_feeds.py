"""How canvases get from the process that denoises them to the API process whose client watches.

A watched request carries the name of its feed: `SOCKET/TOPIC`, two random numbers. The API process
listens on the local socket of that name, in a folder that only its owner can read; the worker
connects to it and marks its messages with the topic. Nobody can guess either, and a name that is no
socket of the folder is ignored.

The canvases of one step go in one message. The worker sends arrays as they are; the API process
makes lists and text of them, and gives each canvas to the feed that its topic names.
"""

import atexit
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""Environment variable with the names of the plugins that vLLM loads, separated by commas."""
PLUGIN = "vllm_dllm_canvas"
"""The name under which this package's entry points serve canvases as well. vLLM loads the endpoint
among them only if `PLUGINS_VARIABLE` names it."""
FOLDER = "DLLM_CANVAS_FOLDER"
"""Environment variable with the folder of sockets, set by a server's first process. Its name does
not begin with VLLM, because vLLM warns of unknown variables that do."""
FEED = "vllm_dllm_canvas_feed"
"""Key of `SamplingParams.extra_args` with the feed's name, which no client can set."""
_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})")
_LONGEST_PATH = 107  # bytes that a local socket's path may have
_DTYPES = (np.int32, np.float32, np.int32, np.float32, np.uint8)
"""Types of a message's arrays, in order: numbers, temperature, tokens, entropy_nats, accepted."""


def new_random_name() -> str:
    """Returns a random name of a socket or topic, 32 hex digits."""
    return secrets.token_hex(16)


def make_socket_folder(base: str) -> None:
    """Makes the folder of sockets in the folder `base`, names it in the environment (`FOLDER`), and
    removes it when this process ends. Does nothing if `FOLDER` is set already."""
    if os.environ.get(FOLDER):
        return
    folder = tempfile.mkdtemp(prefix="vllm-dllm-canvases-", dir=base)  # mode 0700
    os.environ[FOLDER] = folder
    maker = os.getpid()

    def remove() -> None:
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def socket_folder() -> Path | None:
    """Returns the folder of this server's sockets. None: it does not show canvases."""
    name = os.environ.get(FOLDER)
    return Path(name) if name else None


def socket_path(folder: Path, socket: str) -> Path:
    """Returns the path of `socket` in `folder`. Raises ValueError if it is too long."""
    path = folder / socket
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(
            f"VLLM_RPC_BASE_PATH must leave room for the name of a local socket "
            f"({_LONGEST_PATH} bytes in all), got {str(path)!r}. Name a folder with a shorter path."
        )
    return path


def find_socket(feed: str) -> tuple[Path, bytes] | None:
    """Returns the socket and the topic that `feed`, a request's name of its feed, consists of.
    None: the name is malformed, or no such socket is on this machine."""
    match, found = _NAME.fullmatch(feed), socket_folder()
    if match is None or found is None:
        return None
    path = found / match[1]
    return (path, match[2].encode()) if path.is_socket() else None


def pack_canvases(
    topics: Sequence[bytes],  # [n]
    numbers: np.ndarray,  # [n, 4] int32: length, start, step, finished
    temperature: np.ndarray,  # [n] float32
    tokens: np.ndarray,  # [n, C] int32, valid up to `length`
    entropy_nats: np.ndarray,  # [n, C] float32
    accepted: np.ndarray,  # [n, C] bool
) -> bytes:
    """Returns the message with n canvases of one step, for `unpack_canvases`. `tokens`,
    `entropy_nats` and `accepted` have C columns, of which a canvas uses its first `length`. Arrays
    of other dtypes are converted to `_DTYPES`; `accepted` is sent as uint8."""
    arrays = (numbers, temperature, tokens, entropy_nats, accepted)
    typed = (array.astype(of, copy=False) for array, of in zip(arrays, _DTYPES, strict=True))
    return msgspec.msgpack.encode((topics, *(array.tobytes() for array in typed)))


def pack_end(topic: bytes) -> bytes:
    """Returns the message that ends a feed: a topic without a canvas."""
    return msgspec.msgpack.encode(([topic],))


def unpack_canvases(message: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields the topic of each canvas in a message, and the canvas as the client's event has it,
    but without texts, and with `start` in place of `block`: the position of its first token. None
    in place of a canvas: the feed has ended."""
    topics, *arrays = msgspec.msgpack.decode(message)
    if not arrays:
        yield topics[0], None
        return
    numbers, temperature, tokens, nats, accepted = (
        np.frombuffer(array, dtype).reshape(len(topics), -1)
        for array, dtype in zip(arrays, _DTYPES, strict=True)
    )
    nats = nats.astype(np.float64)
    entropy = np.round(nats, 3)
    for i, (length, start, step, finished) in enumerate(numbers.tolist()):
        canvas = {
            "start": start,
            "step": step,
            "finished": bool(finished),
            "temperature": round(temperature[i].item(), 4),
            "mean_entropy": round(nats[i, :length].mean().item(), 4),
            "tokens": tokens[i, :length].tolist(),
            "accepted": accepted[i, :length].tolist(),
            "entropy": entropy[i, :length].tolist(),
        }
        yield topics[i], canvas
