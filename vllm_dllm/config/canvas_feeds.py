"""Where canvases go from the process that denoises them to the one whose client watches.

A watched request carries the name of its feed: `SOCKET/TOPIC`, two random numbers. The API process
listens on the local socket of that name, in a folder that only its owner can read; the worker
connects to it and marks what it sends with the topic. Nobody can guess either, and a name that is
no socket of the folder leads nowhere.

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

FOLDER = "DLLM_CANVAS_FOLDER"
"""Environment variable, which a server's first process hands down to the others. vLLM warns of
unknown ones that begin as its own do."""
FEED = "vllm_dllm_canvas_feed"
"""Key of `SamplingParams.extra_args`, set by the API process and never by a client's wish."""
_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})")
_LONGEST_PATH = 107  # bytes, of a local socket


def new_name() -> str:
    return secrets.token_hex(16)


def make_folder(base: str) -> None:
    """Makes the folder below `base` in the first process of a server, to be removed when this
    process ends. Nothing if a process before this one has made it."""
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
    """The folder of this server's sockets. None: canvases cannot be watched here."""
    name = os.environ.get(FOLDER)
    return Path(name) if name else None


def socket_path(folder: Path, socket: str) -> Path:
    """Raises ValueError where the folder's name leaves no room for it."""
    path = folder / socket
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(
            f"VLLM_RPC_BASE_PATH must leave room for the name of a local socket "
            f"({_LONGEST_PATH} bytes in all), got {str(path)!r}. Name a folder with a shorter path."
        )
    return path


def find_socket(feed: str) -> tuple[Path, bytes] | None:
    """The socket and topic of a request's feed; None if there is no such socket on this machine."""
    match, found = _NAME.fullmatch(feed), socket_folder()
    if match is None or found is None:
        return None
    path = found / match[1]
    return (path, match[2].encode()) if path.is_socket() else None


def pack(
    topics: Sequence[bytes],  # [n]
    numbers: np.ndarray,  # [n, 4] int32: length, block, step, finished
    temperature: np.ndarray,  # [n] float32
    tokens: np.ndarray,  # [n, C] int32, the first `length` of each
    entropy_nats: np.ndarray,  # [n, C] float32
    accepted: np.ndarray,  # [n, C] bool
) -> bytes:
    arrays = (numbers, temperature, tokens, entropy_nats, accepted)
    return msgspec.msgpack.encode((topics, *(array.tobytes() for array in arrays)))


def pack_end(topic: bytes) -> bytes:
    """Nothing more comes: a topic without a canvas."""
    return msgspec.msgpack.encode(([topic],))


def unpack(message: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Topics, and of each an event's `canvas` without the texts; None: the end."""
    topics, *arrays = msgspec.msgpack.decode(message)
    if not arrays:
        yield topics[0], None
        return
    dtypes = (np.int32, np.float32, np.int32, np.float32, np.uint8)
    numbers, temperature, tokens, nats, accepted = (
        np.frombuffer(array, dtype).reshape(len(topics), -1)
        for array, dtype in zip(arrays, dtypes, strict=True)
    )
    nats = nats.astype(np.float64)
    entropy = np.round(nats, 3)
    for i, (length, block, step, finished) in enumerate(numbers.tolist()):
        yield (
            topics[i],
            {
                "block": block,
                "step": step,
                "finished": bool(finished),
                "temperature": round(temperature[i].item(), 4),
                "mean_entropy": round(nats[i, :length].mean().item(), 4),
                "tokens": tokens[i, :length].tolist(),
                "accepted": accepted[i, :length].tolist(),
                "entropy": entropy[i, :length].tolist(),
            },
        )
