"""Compiles kernels of FlashAttention-4 for steps to come, in a process that uses no GPU:

    python -m attention_kernels.fa4_ahead MODULE:FUNCTION STEPS PARENT

MODULE:FUNCTION is vLLM's `flash_attn_varlen_func`, STEPS the JSON of a list of `Step`, PARENT the
id of the process with which this one ends. The environment says for which chip (see
`chip_variables`), and where FlashAttention-4 keeps what it compiles. Tensors are PyTorch's fake
ones, by which it knows that there is nothing to run.
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

from attention_kernels.batch import Batch
from attention_kernels.chunks import Chunks


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


def chip_variables(capability: tuple[int, int], num_multiprocessors: int) -> dict[str, str]:
    """Returns the variables of the environment that make FlashAttention-4 compile for a chip."""
    chip = "sm_{}{}".format(*capability)
    return {
        "FLASH_ATTENTION_ARCH": chip,
        "CUTE_DSL_ARCH": f"{chip}a",
        "FLASH_ATTENTION_NUM_SMS": str(num_multiprocessors),
        "CUDA_VISIBLE_DEVICES": "",  # or PyTorch would take some of its memory
    }


def compile_step(step: Step, forward: Any) -> None:
    """Compiles what a layer runs in `step`. Called with fake tensors. `forward`: vLLM's
    `flash_attn_varlen_func`."""
    from attention_kernels.fa4_fwd import attend_by_flags, attend_chunks  # needs CuTe's compiler

    batch = _fake_batch(step)
    output = torch.empty_like(batch.query)
    if not step.by_flags:
        chunks = Chunks.allocate(batch, step.window_left)
        attend_chunks(
            batch, chunks, output=output, scale=1.0, softcap=step.softcap, forward=forward
        )
        return
    attend_by_flags(
        batch,
        output=output,
        scale=1.0,
        softcap=step.softcap,
        max_query_len=step.query_len,
        max_seq_len=step.longest,
        forward=forward,
    )


def _fake_batch(step: Step) -> Batch:
    """Returns a batch whose tensors have the shapes, types and strides of those in `step`."""

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cuda")

    rows, dtype = step.num_reqs * step.query_len, getattr(torch, step.dtype)
    # As vLLM allocates it: keys beside values, all tokens of a head together.
    shape = (1024, step.num_kv_heads, step.block_size, 2 * step.head_size)
    cache = torch.empty(shape, dtype=dtype, device="cuda").transpose(1, 2)
    keys, values = cache.split(step.head_size, dim=-1)
    return Batch(
        query=torch.empty(rows, step.num_heads, step.head_size, dtype=dtype, device="cuda"),
        key_cache=keys,
        value_cache=values,
        block_table=int32(step.num_reqs, -(-step.longest // step.block_size)),
        query_start_loc=int32(step.num_reqs + 1),
        seq_lens=int32(step.num_reqs),
        causal=int32(step.num_reqs),
        symmetric=int32(step.num_reqs),
        spans=int32(rows, 2) if step.has_images else None,
    )


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
