"""The plain-PyTorch NVFP4 and compressed-tensors agree bit for bit, within the format's error."""

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from tests import nvfp4_format, tolerances

pytestmark = pytest.mark.numerics

SCHEME = preset_name_to_scheme("NVFP4", ["Linear"])


@pytest.fixture(autouse=True)
def without_compiler():
    """compressed-tensors compiles its rounding, for seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def heavy_tails() -> torch.Tensor:
    """Groups 20 binary orders apart: scales from fp8's largest number to below its smallest."""
    return torch.randn(64, 128) * 2.0 ** torch.randint(-20, 1, (64, 8)).repeat_interleave(16, -1)


def ties() -> torch.Tensor:
    """Multiples of half a gap under scales of one: every second value lies between two codes."""
    groups = torch.randint(-24, 25, (64, 64)) / 4.0
    groups[:, ::16] = 6.0
    return groups


def zeros_of_both_signs() -> torch.Tensor:
    values = torch.randn(8, 64)
    values[:2], values[2:4, :16], values[5, 3] = 0.0, -0.0, -0.0
    return values


CASES = {
    "normal": lambda: torch.randn(96, 256),
    "bf16": lambda: torch.randn(96, 256).bfloat16().float(),
    "heavy tails": heavy_tails,
    "ties": ties,
    "zeros of both signs": zeros_of_both_signs,
    "nothing but zeros": lambda: torch.zeros(4, 32),
    "one row, one group": lambda: torch.randn(1, 16),
    "too small for a global scale": lambda: torch.full((2, 16), 1e-37),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def values(request) -> torch.Tensor:
    return request.param()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_quantises_as_compressed_tensors_does(values):
    expected_scale = generate_gparam(values.amin(), values.amax())
    groups = values.unflatten(-1, (-1, 16))
    group_scales, _ = calculate_qparams(
        groups.amin(-1), groups.amax(-1), SCHEME.weights, global_scale=expected_scale
    )
    expected = NVFP4PackedCompressor.compress(
        {
            "weight": values,
            "weight_scale": group_scales,
            "weight_global_scale": expected_scale,
        },
        SCHEME,
    )
    scale = nvfp4_format.global_scale(values.abs().amax())
    packed, scales = nvfp4_format.quantize(values, scale)
    assert torch.equal(scale, expected["weight_global_scale"])
    assert scales.dtype == expected["weight_scale"].dtype == torch.float8_e4m3fn
    assert torch.equal(bits(scales), bits(expected["weight_scale"]))
    assert torch.equal(packed, expected["weight_packed"])


def test_dequantises_as_compressed_tensors_does(values):
    scale = nvfp4_format.global_scale(values.abs().amax())
    packed, scales = nvfp4_format.quantize(values, scale)
    unpacked = unpack_fp4_from_uint8(packed, *values.shape, dtype=torch.float32)
    expected = dequantize(unpacked, scales.float(), args=SCHEME.weights, global_scale=scale)
    assert torch.equal(nvfp4_format.dequantize(packed, scales, scale), expected)


def test_error_bound(values):
    scale = nvfp4_format.global_scale(values.abs().amax())
    packed, scales = nvfp4_format.quantize(values, scale)
    error = (nvfp4_format.dequantize(packed, scales, scale) - values).abs()
    # fp32 rounds in the division and in the multiplication.
    bound = nvfp4_format.error_bound(values, scales, scale) + tolerances.SHORT * values.abs()
    assert (error <= bound).all()


def test_error_bound_is_reached():
    values = torch.randn(256, 256)
    scale = nvfp4_format.global_scale(values.abs().amax())
    packed, scales = nvfp4_format.quantize(values, scale)
    error = (nvfp4_format.dequantize(packed, scales, scale) - values).abs()
    assert (error / nvfp4_format.error_bound(values, scales, scale)).max() > 0.99
    # And in all: half a gap of 2 under a step of amax / 6, which itself is rounded by 1/16.
    largest = values.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    assert (error.unflatten(-1, (-1, 16)) <= largest / 6 * (1 + 1 / 16)).all()


def test_rounding_of_every_bf16_number():
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[numbers.isfinite()].clamp(-6, 6).reshape(1, -1)
    expected = pack_fp4_to_uint8(FP4_E2M1_DATA.cast_to_fp4(numbers.clone()))
    assert torch.equal(nvfp4_format.pack(nvfp4_format.round_to_e2m1(numbers)), expected)


def test_unpacks_every_byte():
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    expected = unpack_fp4_from_uint8(packed, 16, 32, dtype=torch.float32)
    unpacked = nvfp4_format.unpack(packed)
    assert torch.equal(unpacked, expected) and torch.equal(bits(unpacked), bits(expected))
