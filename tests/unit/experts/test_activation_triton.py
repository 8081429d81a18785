"""Activation and quantisation in one launch against their definition, in Triton's interpreter where
there is no GPU."""

import pytest
import torch

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.experts import activation_triton, definition

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = 2.0**-3  # between neighbours in e4m3, as a share
SUBNORMAL = 2.0**-9  # the least number above 0
SAME = 0.99
"""Share of numbers that are the same. The others lie next to a tie, where a last bit decides."""


@pytest.fixture(autouse=True)
def interpreted() -> None:
    if not torch.cuda.is_available():
        interpret_kernels(activation_triton)


@pytest.mark.parametrize("activation", definition.ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(1, 64, torch.float32), (37, 704, torch.float32), (5, 704, torch.float16)],
)
def test_activates_and_quantises(
    rows: int, width: int, dtype: torch.dtype, activation: str
) -> None:
    """The last row is 0, and the one before as large as it may be."""
    torch.manual_seed(0)
    products = torch.randn(rows, 2 * width).to(DEVICE, dtype)
    products[-1] = 0
    if rows > 1:
        products[-2] *= 50
    quantised = torch.full((rows, width), 1.0, device=DEVICE).to(definition.FP8)
    scale = torch.full((rows, 1), torch.nan, device=DEVICE)
    activation_triton.activate_and_quantise(products, quantised, scale, activation)

    gate, up = products.float().chunk(2, dim=-1)
    value = (definition.ACTIVATIONS[activation](gate) * up).to(dtype)
    expected, expected_scale = definition.quantise(value)
    share = tolerances.SHORT + torch.finfo(dtype).eps
    torch.testing.assert_close(scale, expected_scale, **tolerances.within(share))
    found, wanted = quantised.float(), expected.float()
    allowed = (STEP * wanted.abs()).clamp_min(SUBNORMAL)
    tolerances.assert_within(found, wanted, allowed)
    assert (found == wanted).float().mean() >= SAME
    assert not found[-1].any()
