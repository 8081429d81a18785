"""Compiles the Triton version for GPUs that are not there, and prints what its test looks for.

A process of its own: the tests' process may have Triton's functions in the interpreter.

    python compile_triton.py '[[CAPABILITY, HEAD_SIZE, GROUP, PAGE, CACHE_DTYPE], ...]'
"""

import json
import sys

import triton

from attention_kernels import chunks, triton_fwd
from attention_kernels.support import shared_bytes
from tests import triton_for_gpus

POINTERS = {
    "query": "bf16",
    "key_cache": "cache",
    "value_cache": "cache",
    "block_table": "i32",
    "query_start_loc": "i32",
    "seq_lens": "i32",
    "causal": "i32",
    "symmetric": "i32",
    "key_scale": "fp32",
    "value_scale": "fp32",
    "output": "bf16",
    "partial_output": "fp32",
    "partial_lse": "fp32",
    "chunk_start_loc": "i32",
    "chunk_seq_lens": "i32",
    "chunk_block_table": "i32",
    "bands": "i32",
}


def compile_kernel(kernel, capability, constants, cache_dtype, **options):
    pointers = {name: cache_dtype if kind == "cache" else kind for name, kind in POINTERS.items()}
    return triton_for_gpus.compile_kernel(
        kernel, capability, pointers, constants, ("scale", "softcap"), **options
    )


def compile_case(capability, head_size, group, page, cache_dtype):
    tiles = triton_fwd.Tiles.choose(head_size, group, 2, shared_bytes(divmod(capability, 10)))
    padded = triton.next_power_of_2(head_size)
    main = {
        "HQ": 2 * group,
        "GROUP": group,
        "HEADS": tiles.heads,
        "PARTS": triton.cdiv(group, tiles.heads),
        "D": head_size,
        "D_PADDED": padded,
        "PAGE": page,
        "BLOCK_Q": tiles.block_q,
        "BLOCK_N": tiles.block_n,
        "SPLITS": 4,
        "HAS_WINDOW": head_size < 512,
        "HAS_SOFTCAP": False,
        "HAS_KEY_SCALE": cache_dtype != "bf16",
        "HAS_VALUE_SCALE": cache_dtype != "bf16",
    }
    schedule = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = compile_kernel(
        triton_fwd._attention_kernel, capability, main, cache_dtype, **schedule
    )
    join = {"HQ": 2 * group, "D": head_size, "D_PADDED": padded, "SPLITS": 4, "SPLITS_PADDED": 4}
    compile_kernel(triton_fwd._join_kernel, capability, join, cache_dtype)
    cut = {"CHUNK": chunks.CHUNK, "PAGE": page, "PAGES_A_STEP": 128}
    compile_kernel(chunks._cut_kernel, capability, cut, cache_dtype)
    ptx = compiled.asm["ptx"]
    instructions = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "cp.async", "ld.local")
    return {
        "shared_bytes": compiled.metadata.shared,
        "calls in the loop": compiled.asm["ttgir"].partition("scf.for")[2].count("tt.call"),
        **{instruction: ptx.count(instruction) for instruction in instructions},
    }


if __name__ == "__main__":
    print(json.dumps([compile_case(*case) for case in json.loads(sys.argv[1])]))
