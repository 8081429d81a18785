"""Compiles the drafters' kernels for a GPU that is not there, and prints what its test looks for.

A process of its own: the tests' process may have Triton's functions in the interpreter.

    python compile_triton.py CAPABILITY
"""

import json
import sys

from attention_kernels.support import FIRST_FP8_CAPABILITY, shared_bytes
from tests.triton_for_gpus import compile_kernel
from vllm_dllm.drafters import context_kv_triton

POINTERS = {
    **dict.fromkeys(("states", "hidden_norm", "projection", "bias", "projected"), "bf16"),
    **dict.fromkeys(("k_norm", "like_caches"), "bf16"),
    **dict.fromkeys(("cos_sin", "scales"), "fp32"),
    **dict.fromkeys(("positions", "slots", "addresses"), "i64"),
}
HEAD = {"NUM_HEADS": 8, "HEAD_SIZE": 128, "ROTATING": 128, "HALF": 64, "IS_NEOX": True}


def compiled(
    kernel, capability: int, constants: dict[str, object], options: dict[str, int], **types: str
) -> dict[str, int]:
    pointers = {name: kind for name, kind in (POINTERS | types).items() if name in kernel.arg_names}
    found = compile_kernel(
        kernel, capability, pointers, constants, ("eps", "value_factor"), **options
    )
    ptx = found.asm["ptx"]
    instructions = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "ld.local", "cp.async")
    return {
        "shared_bytes": found.metadata.shared,
        **{instruction: ptx.count(instruction) for instruction in instructions},
    }


def fused(capability: int, num_tokens: int, **changes: object) -> dict[str, int]:
    constants = HEAD | {"HIDDEN_SIZE": 4096, "HAS_BIAS": False}
    constants |= {key: value for key, value in changes.items() if key in HEAD}
    tiles = context_kv_triton.fused_tiles(
        num_tokens, constants["HEAD_SIZE"], 2, shared_bytes(divmod(capability, 10))
    )
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    types = {key: value for key, value in changes.items() if key not in HEAD}
    kernel = context_kv_triton._project_and_store_kernel
    return compiled(kernel, capability, constants | tiles, options, **types)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    wide = {"HEAD_SIZE": 256, "ROTATING": 64, "HALF": 128, "IS_NEOX": False}
    rows = {"ROWS": context_kv_triton._ROWS}
    after_gemm = context_kv_triton._store_projected_kernel
    found = {
        "fused, 64 tokens": fused(capability, 64),
        "fused, 16 tokens": fused(capability, 16),
        "fused, heads of 256": fused(capability, 64, **wide),
        "after a GEMM": compiled(after_gemm, capability, HEAD | rows, {}),
    }
    if divmod(capability, 10) >= FIRST_FP8_CAPABILITY:
        found["after a GEMM, fp8 cache"] = compiled(
            after_gemm, capability, HEAD | rows, {}, like_caches="fp8e4nv"
        )
    print(json.dumps(found))
