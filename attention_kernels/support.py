"""Says what the GPU versions support on which GPU: None, or in words why not.

FlashAttention-4's limits were read in the source of flash-attn-4 4.0.0b36.
"""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
TRITON_HEAD_SIZES = range(16, 513)
FIRST_FP8_CAPABILITY = (8, 9)  # for an fp8 cache, in Triton
FA4_HEAD_SIZES = {  # by the major compute capability
    # With other sizes a key tile is not a multiple of the rows that one pass loads from pages:
    # the last pass would write past the tile.
    9: (32, 48, 64, 112, 128, 192, 256),
    10: (*range(32, 129, 16), 256),
}
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_LEAST_SHARED_KIB = 99  # every GPU since Ampere has this much


class Case(NamedTuple):
    """What the limits of a version depend on: a layer and the GPU that it runs on."""

    capability: tuple[int, int]  # compute capability of the GPU
    head_size: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype


def shared_bytes(capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that one program may use on a GPU of this compute
    capability."""
    return _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) * 1024


def triton_reason(case: Case) -> str | None:
    """Returns why the Triton version cannot run `case`, in words that complete "impl 'triton'
    takes". Returns None if it can."""
    if case.head_size not in TRITON_HEAD_SIZES:
        first, last = TRITON_HEAD_SIZES[0], TRITON_HEAD_SIZES[-1]
        return f"head sizes from {first} to {last}, got query with {case.head_size}"
    if case.capability < (8, 0):
        return f"GPUs of compute capability 8.0 and up, got {_name(case)}"
    if case.cache_dtype == FP8 and case.capability < FIRST_FP8_CAPABILITY:
        return f"an fp8 key_cache on GPUs of compute capability 8.9 and up, got {_name(case)}"
    return None


def fa4_reason(case: Case) -> str | None:
    """Returns why FlashAttention-4 cannot run `case`, in words that complete "impl 'fa4' takes".
    Returns None if it can."""
    sizes = FA4_HEAD_SIZES.get(case.capability[0])
    if sizes is None:
        return f"Hopper and data-centre Blackwell GPUs (9.x, 10.x), got {_name(case)}"
    if case.head_size not in sizes:
        return f"head sizes {list(sizes)} on {_name(case)}, got query with {case.head_size}"
    if case.query_dtype not in (torch.float16, torch.bfloat16):
        return f"float16 and bfloat16, got query with {case.query_dtype}"
    if case.cache_dtype != case.query_dtype:
        return f"a key_cache of the query's dtype {case.query_dtype}, got {case.cache_dtype}"
    return None


def _name(case: Case) -> str:
    """Returns the GPU's architecture by NVIDIA's name, such as sm_90."""
    return "sm_{}{}".format(*case.capability)
