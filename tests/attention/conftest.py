from types import ModuleType

import pytest
import torch

from attention_kernels import triton_fwd
from vllm_dllm.cpu.interpret import interpret_triton_language


@pytest.fixture(scope="session")
def triton_version() -> ModuleType:
    """`triton_fwd`, its kernels in Triton's interpreter where there is no GPU."""
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        interpret_triton_language()
        for name, value in list(vars(triton_fwd).items()):
            if isinstance(value, JITFunction):
                setattr(triton_fwd, name, InterpretedFunction(value.fn))
    return triton_fwd
