"""Arithmetic of NVFP4 on CPUs."""

import importlib

import pytest
import torch

from tests import tolerances
from vllm_dllm.cpu import formats

pytestmark = pytest.mark.numerics

FP8 = torch.float8_e4m3fn


def test_nvfp4_is_vllms_emulation() -> None:
    """Values, block scales and ties, against vLLM's own functions, which are slower and round their
    operands to the model's type."""
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation

    packed = torch.arange(256, dtype=torch.uint8).repeat(4, 1)
    block_scale = torch.linspace(0.01, 448, 4 * 32).view(4, 32).to(FP8)
    one = torch.tensor(1.0)
    expected = emulation.dequantize_to_dtype(packed, block_scale, one, torch.float32, swizzle=False)
    assert torch.equal(formats.decode_nvfp4(packed, block_scale, one).values, expected)

    # One of the 16 is 6, so that with a global scale of 1 the others are rounded as they are.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2)
    x = torch.stack((ties, -ties, torch.zeros(16), 1000 * ties, torch.randn(16)))
    for global_scale in (torch.tensor(1.0), torch.tensor(37.5)):
        values, scale = formats.quantize_nvfp4(x, global_scale)
        expected = emulation.ref_nvfp4_quant_dequant(x.clone(), global_scale, 16)
        torch.testing.assert_close(values * scale, expected, **tolerances.short_formula(0.0))


def test_import_while_a_model_is_built() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            importlib.reload(formats)
    finally:
        torch.set_default_dtype(torch.float32)
    block_scale = torch.ones(1, 1).to(FP8)
    packed = torch.full((1, 8), 0x7F, dtype=torch.uint8)
    assert formats.decode_nvfp4(packed, block_scale, torch.tensor(1.0)).values[0, :2].tolist() == [
        -6.0,
        6.0,
    ]
