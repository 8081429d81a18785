"""Compiles kernels of FlashAttention-4 for steps to come, in a process that uses no GPU:

    python -m attention_kernels.fa4_ahead MODULE:FUNCTION STEPS PARENT

MODULE:FUNCTION is vLLM's `flash_attn_varlen_func`, STEPS the JSON of a list of `Step`, PARENT the
id of the process with which this one ends. The environment says for which chip, and where
FlashAttention-4 keeps what it compiles (see `variables`). Tensors are PyTorch's fake ones, by which
it knows that there is nothing to run.
"""

import importlib
import json
import os
import sys
import threading
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_kernels.chunks import CHUNK, Chunks


class Step(NamedTuple):
    """What decides which kernel a layer runs in a step."""

    by_flags: bool  # else by masks
    has_images: bool
    num_reqs: int
    query_len: int  # of each request
    longest: int  # tokens of a request
    head_size: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    window_left: int
    softcap: float
    dtype: str  # PyTorch's name


def variables(capability: tuple[int, int], num_multiprocessors: int) -> dict[str, str]:
    """Returns the variables of the environment that make FlashAttention-4 compile for a chip."""
    chip = "sm_{}{}".format(*capability)
    return {
        "FLASH_ATTENTION_ARCH": chip,
        "CUTE_DSL_ARCH": f"{chip}a",
        "FLASH_ATTENTION_NUM_SMS": str(num_multiprocessors),
        "CUDA_VISIBLE_DEVICES": "",  # or PyTorch would take some of its memory
    }


def compile_step(step: Step, forward: Any) -> None:
    """Compiles what a layer runs in `step`. Called with fake tensors."""
    from attention_kernels.fa4_flags import attend_by_flags
    from attention_kernels.fa4_fwd import attend_chunks  # needs the compiler of CuTe

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cuda")

    rows, dtype = step.num_reqs * step.query_len, getattr(torch, step.dtype)
    query = torch.empty(rows, step.num_heads, step.head_size, dtype=dtype, device="cuda")
    # As vLLM allocates it: keys beside values, all tokens of a head together.
    shape = (1024, step.num_kv_heads, step.block_size, 2 * step.head_size)
    cache = torch.empty(shape, dtype=dtype, device="cuda").transpose(1, 2)
    keys, values = cache.split(step.head_size, dim=-1)
    num_pages = -(-step.longest // step.block_size)
    if step.by_flags:
        attend_by_flags(
            query,
            keys,
            values,
            int32(step.num_reqs, num_pages),
            int32(step.num_reqs + 1),
            int32(step.num_reqs),
            int32(step.num_reqs),
            output=torch.empty_like(query),
            scale=1.0,
            softcap=step.softcap,
            max_query_len=step.query_len,
            max_seq_len=step.longest,
            forward=forward,
        )
        return
    count = rows // CHUNK + step.num_reqs
    if step.window_left >= 0:
        num_pages = min(num_pages, -(-(step.window_left + rows) // step.block_size) + 1)
    chunks = Chunks(
        int32(count + 1),
        int32(count),
        int32(count, num_pages),
        int32(count, 3),
        int32(count, CHUNK, 2) if step.has_images else None,
    )
    output = torch.empty_like(query)
    attend_chunks(query, keys, values, chunks, output, 1.0, step.softcap, forward)


def end_with(parent: int) -> None:
    """Ends this process soon after its parent, a process id."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Compiles what the command line asks for."""
    threading.Thread(target=end_with, args=(int(sys.argv[3]),), daemon=True).start()
    module, function = sys.argv[1].split(":")
    forward = partial(getattr(importlib.import_module(module), function), fa_version=4)
    with FakeTensorMode():
        for step in json.loads(sys.argv[2]):
            compile_step(Step(*step), forward)


if __name__ == "__main__":
    main()
