"""Compiles a Triton kernel for a GPU that is not there."""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_kernel(
    kernel: Any,
    capability: int,  # 90 for sm_90
    pointers: Mapping[str, str],  # arguments that are addresses, and the types of what is there
    constants: Mapping[str, object],
    floats: Sequence[str] = (),  # arguments that are fp32 numbers; the others are int32
    **options: int,
) -> Any:
    """With strides and addresses that are multiples of 16, as at run time."""
    signature = {}
    for name in kernel.arg_names:
        if name in pointers:
            signature[name] = "*" + pointers[name]
        elif name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "fp32" if name in floats else "i32"
    names = list(signature)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name in pointers or "stride" in name
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
