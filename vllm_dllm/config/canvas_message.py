"""The canvases of one step on their way from the worker to an API process, all in one message.

The worker sends arrays as they are; the API process makes lists and text of them, and gives each
canvas to the feed that its topic names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

TOPIC_BYTES = 32
_COUNT = np.dtype(np.int32)
_NUMBERS = ("length", "block", "step", "finished")


def pack(
    topics: Sequence[bytes],  # [n], of TOPIC_BYTES each
    numbers: np.ndarray,  # [n, 4] int32: length, block, step, finished
    temperature: np.ndarray,  # [n] float32
    tokens: np.ndarray,  # [n, C] int32, the first `length` of each
    entropy_nats: np.ndarray,  # [n, C] float32
    accepted: np.ndarray,  # [n, C] bool
) -> bytes:
    count = np.array(len(topics), dtype=_COUNT)
    arrays = (count, numbers, temperature, tokens, entropy_nats, accepted)
    return b"".join((*(array.tobytes() for array in arrays), *topics))


def pack_end(topic: bytes) -> bytes:
    """Nothing more comes: a canvas of no length."""
    numbers = np.zeros((1, len(_NUMBERS)), dtype=np.int32)
    nothing = np.empty((1, 0), dtype=np.int32)
    return pack([topic], numbers, np.zeros(1, dtype=np.float32), nothing, nothing, nothing)


def unpack(message: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Topics, and of each an event's `canvas` without the texts; None: the end."""
    n = int(np.frombuffer(message, _COUNT, count=1)[0])
    of_canvas = 4 * len(_NUMBERS) + 4 + TOPIC_BYTES
    width = ((len(message) - _COUNT.itemsize) // n - of_canvas) // 9
    read = _Reader(message, _COUNT.itemsize)
    numbers = read.array(np.int32, n, len(_NUMBERS)).tolist()
    temperature = read.array(np.float32, n).tolist()
    tokens = read.array(np.int32, n, width).tolist()
    nats = read.array(np.float32, n, width).astype(np.float64)
    accepted = read.array(np.uint8, n, width).tolist()
    entropy = np.round(nats, 3).tolist()
    for i, (length, block, step, finished) in enumerate(numbers):
        first = read.place + i * TOPIC_BYTES
        topic = message[first : first + TOPIC_BYTES]
        if length == 0:
            yield topic, None
            continue
        yield (
            topic,
            {
                "block": block,
                "step": step,
                "finished": bool(finished),
                "temperature": round(temperature[i], 4),
                "mean_entropy": round(float(nats[i, :length].mean()), 4),
                "tokens": tokens[i][:length],
                "accepted": accepted[i][:length],
                "entropy": entropy[i][:length],
            },
        )


class _Reader:
    """Arrays one after the other."""

    def __init__(self, message: bytes, place: int) -> None:
        self._message, self.place = message, place

    def array(self, dtype: type[np.generic], *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        found = np.frombuffer(self._message, dtype, count, self.place)
        self.place += found.nbytes
        return found.reshape(shape)
