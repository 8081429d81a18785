"""Messages with which the worker sends watched canvases to the API process (`config.canvas_feeds`).

The canvases of one step go in one message. The worker sends arrays as they are; the API process
makes lists and text of them, and gives each canvas to the feed that its topic names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

_DTYPES = (np.int32, np.float32, np.int32, np.float32, np.uint8)
"""Types of a message's arrays, in order: numbers, temperature, tokens, entropy_nats, accepted."""


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
