from types import ModuleType

import pytest
import torch

from attention_kernels import chunks, tiling, triton_fwd
from vllm_dllm.cpu.interpret import interpret_triton_language


@pytest.fixture(scope="session")
def triton_version() -> ModuleType:
    """`triton_fwd`, its kernels in Triton's interpreter where there is no GPU."""
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        interpret_triton_language()
        for module in (tiling, triton_fwd, chunks):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, name, InterpretedFunction(value.fn))
    return triton_fwd
