"""Compiles the sampler's kernels for a GPU that is not there, and prints what its test looks for.

A process of its own: the tests' process may have Triton's functions in the interpreter.

    python compile_triton.py CAPABILITY
"""

import json
import sys

from tests.triton_for_gpus import compile_kernel
from vllm_dllm.denoise import expected_embedding_triton as embedding
from vllm_dllm.denoise import vocab_stream_triton as vocabulary

POINTERS = {
    "output": "bf16",
    "logits": "bf16",
    "embeddings": "bf16",
    "best": "i64",
    "candidate": "i64",
    "needed": "i32",
    **dict.fromkeys(("temperature", "within", "maximum", "total", "weighted"), "fp32"),
    **dict.fromkeys(("sums", "totals"), "fp32"),
}


def compiled(kernel, capability: int, constants: dict[str, object], **types: str) -> dict[str, int]:
    found = compile_kernel(kernel, capability, POINTERS | types, constants, ("softcap",))
    ptx = found.asm["ptx"]
    instructions = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "ld.local")
    return {
        "shared_bytes": found.metadata.shared,
        **{instruction: ptx.count(instruction) for instruction in instructions},
    }


if __name__ == "__main__":
    capability = int(sys.argv[1])
    tiles = {"ROWS": embedding._ROWS, "HIDDEN": embedding._HIDDEN, "TOKENS": embedding._TOKENS}
    block = {"BLOCK": vocabulary.BLOCK}
    found = {
        "add_needed": compiled(embedding._add_needed_kernel, capability, {**block, **tiles}),
        "add_needed in fp32": compiled(
            embedding._add_needed_kernel,
            capability,
            {**block, **tiles},
            logits="fp32",
            embeddings="fp32",
        ),
        "read_blocks": compiled(
            vocabulary._read_blocks_kernel, capability, {**block, "HAS_SOFTCAP": True}
        ),
    }
    print(json.dumps(found))
