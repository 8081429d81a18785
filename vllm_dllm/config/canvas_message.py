"""The canvases of one step on their way from the worker to an API process, all in one message.

The worker sends arrays as they are; the API process makes lists and text of them, and gives each
canvas to the feed that its topic names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np


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
