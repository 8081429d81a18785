"""NumPy views of memory that vLLM hands to a kernel by address."""

import ctypes
import math
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=256)
def int32_at(address: int, *shape: int) -> np.ndarray:
    """The int32 array of this shape that starts at `address`. The caller must know that it is
    alive. The view is only an address and a length, so keeping it is harmless."""
    numbers = (ctypes.c_int32 * math.prod(shape)).from_address(address)
    return np.frombuffer(memoryview(numbers).cast("B"), dtype=np.int32).reshape(shape)
