"""Requests of every kind side by side, and small batches of them."""

from typing import Any

from attention_kernels.testing import PagedBatch, Request

MIXES = {
    "causal": [
        Request(5, 0, causal=True),
        Request(1, 40, causal=True),
        Request(9, 17, causal=True),
    ],
    "canvases": [Request(8, 33), Request(8, 2), Request(1, 50), Request(3, 0)],
    "mixed": [
        Request(8, 37),
        Request(8, 37, symmetric=True),
        Request(8, 37, causal=True),
        Request(0, 12),
        Request(21, 5, symmetric=True),
        Request(1, 0, causal=True),
    ],
    "blocks": [
        Request(8, 36, causal=4),
        Request(64, 32, causal=32),
        Request(23, 0, causal=4),  # ends inside a block
        Request(9, 17, causal=4),  # begins in one
        Request(8, 37),
        Request(8, 37, causal=True),
    ],
    # Of 1 token, and of as many as a window of 16 holds, one fewer, one more and three times that.
    "images": [
        Request(30, 20, causal=True, images=((20, 28), (35, 50))),  # as its rows begin and end
        Request(8, 37),
        Request(45, 0, causal=True, images=((3, 4), (6, 22), (23, 40))),
        Request(8, 37, symmetric=True),
        Request(59, 40, causal=True, images=((42, 90), (90, 97))),  # side by side
        Request(9, 17, causal=True),
        Request(16, 0, causal=True, images=((0, 16),)),
        Request(30, 40, causal=True, images=((25, 50), (52, 70))),  # its first rows are cached
    ],
}
VERIFIED = [  # blocks with their second copies, beside other requests; without windows
    Request(8, 36, causal=-4),
    Request(7, 37, causal=-4),  # the cache holds the block's first token
    Request(64, 96, causal=-32),
    Request(40, 0, causal=-32),  # the copy is cut short
    Request(3, 32, causal=-4),  # so is the block: it has no copy
    Request(0, 12, causal=-4),
    Request(13, 21, causal=4),
    Request(9, 130, causal=True),
    Request(6, 70),
]


def small_batch(requests: list[Request] = MIXES["mixed"], **options: Any) -> PagedBatch:
    return PagedBatch.random(
        requests,
        **{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "block_size": 16, **options},
    )
