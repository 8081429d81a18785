"""A canvas on its way from the worker to the API process.

The worker sends arrays as they are; the API process makes lists and text of them.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np


def pack(
    header: dict[str, Any],  # numbers that say which canvas it is
    tokens: np.ndarray,  # [length] int32
    accepted: np.ndarray,  # [length] bool
    entropy_nats: np.ndarray,  # [length] float32
) -> list[bytes]:
    return [
        json.dumps(header).encode(),
        tokens.tobytes(),
        accepted.tobytes(),
        entropy_nats.tobytes(),
    ]


def unpack(parts: Sequence[bytes]) -> dict[str, Any]:
    """An event's `canvas`, without the texts."""
    header, tokens, accepted, entropy = parts
    nats = np.frombuffer(entropy, dtype=np.float32).astype(np.float64)
    return {
        **json.loads(header),
        "mean_entropy": round(float(nats.mean()), 4),
        "tokens": np.frombuffer(tokens, dtype=np.int32).tolist(),
        "accepted": np.frombuffer(accepted, dtype=np.uint8).tolist(),
        "entropy": np.round(nats, 3).tolist(),
    }
