"""Weights that are not numbers are found, in every type that checkpoints have."""

import math

import pytest
import torch

from vllm_dllm.models.expected_weights import describe_non_finite, describe_wrong_scale

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_of_many(dtype: torch.dtype, value: float) -> None:
    weight = torch.ones(300, 70, dtype=dtype)
    assert describe_non_finite(weight) is None
    weight[299, 3] = value
    found = describe_non_finite(weight)
    assert found == f"its numbers must be finite, got 1 of 21000 that are not, the first {value}"


def test_infinities_that_cancel() -> None:
    found = describe_non_finite(torch.tensor([1.0, math.inf, -math.inf]))
    assert found is not None and "got 2 of 3" in found


def test_large_numbers_are_numbers() -> None:
    assert describe_non_finite(torch.full((4,), 3e38)) is None


def test_fp8() -> None:
    weight = torch.linspace(-448, 448, 100).to(torch.float8_e4m3fn)
    assert describe_non_finite(weight) is None
    for bits in (0x7F, 0xFF):
        wrong = weight.view(torch.uint8).clone()
        wrong[7] = bits
        found = describe_non_finite(wrong.view(torch.float8_e4m3fn))
        assert found is not None and "got 1 of 100 that are not, the first nan" in found


def test_what_holds_no_numbers() -> None:
    assert describe_non_finite(torch.full((4,), 255, dtype=torch.uint8)) is None
    assert describe_non_finite(torch.empty(4, device="meta")) is None
    assert describe_non_finite(torch.empty(0)) is None


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
def test_scales(dtype: torch.dtype) -> None:
    scales = torch.full((30, 7), 0.5)
    scales[0, 0], scales[0, 1] = 448.0, 2.0**-9  # FP8's largest and smallest
    assert describe_wrong_scale("weight_scale", scales.to(dtype)) is None
    for wrong in (0.0, -0.0, -0.5, math.nan, *(() if dtype.itemsize == 1 else (math.inf,))):
        scales[29, 3] = wrong
        found = describe_wrong_scale("weight_scale", scales.to(dtype))
        assert found == f"it must only hold positive finite numbers, got {wrong}"
    assert describe_wrong_scale("weight", scales.to(dtype)) is None
    assert describe_wrong_scale("weight_scale", torch.empty(0, dtype=dtype)) is None
