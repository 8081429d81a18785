"""FP8 linears on a CPU multiply in our kernel."""

import torch
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.platforms import PlatformEnum

from vllm_dllm.cpu.compat.kernels import prefer_linear_kernel
from vllm_dllm.cpu.quantization.linear import CpuFp8LinearKernel


def test_vllm_asks_it_first() -> None:
    kernels = vllm_kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    assert kernels[0] is CpuFp8LinearKernel
    prefer_linear_kernel("fp8", CpuFp8LinearKernel)
    assert kernels.count(CpuFp8LinearKernel) == 1


def test_scales_rows_and_channels_and_adds_the_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (2, 3, 16), generator=generator).float()
    weight = torch.randint(-8, 9, (5, 16), generator=generator).float()
    x_scale = 2.0 ** torch.randint(-3, 4, (6, 1), generator=generator)
    scale = 2.0 ** torch.randint(-3, 4, (5, 1), generator=generator)
    bias = torch.arange(5.0)
    kernel = CpuFp8LinearKernel.__new__(CpuFp8LinearKernel)
    out = kernel.apply_scaled_mm(
        A=x.flatten(0, 1).to(torch.float8_e4m3fn),
        B=weight.to(torch.float8_e4m3fn).t(),
        out_dtype=torch.float32,
        As=x_scale,
        Bs=scale,
        bias=bias,
        output_shape=[2, 3, 5],
    )
    assert torch.equal(out, (x * x_scale.view(2, 3, 1)) @ (weight * scale).T + bias)
