"""Compiles the sampler's kernels for a GPU that is not there, and prints what its test looks for.

A process of its own: the tests' process may have Triton's functions in the interpreter.

    python compile_triton.py CAPABILITY
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_dllm.denoise import expected_embedding_triton as embedding
from vllm_dllm.denoise import vocab_stream_triton as vocabulary

POINTERS = {
    "output": "*bf16",
    "logits": "*bf16",
    "embeddings": "*bf16",
    "best": "*i64",
    "candidate": "*i64",
    "needed": "*i32",
    **dict.fromkeys(("temperature", "within", "maximum", "total", "weighted"), "*fp32"),
    **dict.fromkeys(("sums", "totals"), "*fp32"),
}


def compile_kernel(
    kernel, capability: int, constants: dict[str, object], pointers: dict[str, str] = POINTERS
) -> dict[str, int]:
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in kernel.arg_names
    }
    signature |= {name: "fp32" for name in signature if name == "softcap"}
    names = list(signature)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name in POINTERS or "stride" in name
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    ptx = compiled.asm["ptx"]
    instructions = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "ld.local")
    return {
        "shared_bytes": compiled.metadata.shared,
        **{instruction: ptx.count(instruction) for instruction in instructions},
    }


if __name__ == "__main__":
    capability = int(sys.argv[1])
    in_fp32 = dict.fromkeys(("logits", "embeddings"), "*fp32")
    tiles = {"ROWS": embedding._ROWS, "HIDDEN": embedding._HIDDEN, "TOKENS": embedding._TOKENS}
    block = {"BLOCK": vocabulary.BLOCK}
    found = {
        "add_needed": compile_kernel(embedding._add_needed_kernel, capability, {**block, **tiles}),
        "add_needed in fp32": compile_kernel(
            embedding._add_needed_kernel, capability, {**block, **tiles}, POINTERS | in_fp32
        ),
        "read_blocks": compile_kernel(
            vocabulary._read_blocks_kernel, capability, {**block, "HAS_SOFTCAP": True}
        ),
    }
    print(json.dumps(found))
