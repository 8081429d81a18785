"""Quantisation, alone and with the activation in one launch, against the definition, in Triton's
interpreter where there is no GPU."""

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


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1, 64, torch.float32),
        (300, 704, torch.float32),
        (37, 2816, torch.float16),
        pytest.param(4096, 2816, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_quantises_as_the_definition(rows: int, width: int, dtype: torch.dtype) -> None:
    """Rows of sizes from the smallest scale on; the last is 0."""
    torch.manual_seed(0)
    sizes = torch.logspace(-6, 4, rows).unsqueeze(1)
    states = (torch.randn(rows, width) * sizes).to(DEVICE, dtype)
    states[-1] = 0
    assert_same(states)


def test_quantises_every_number_of_bf16_as_the_definition() -> None:
    """Numbers of 8 bits often lie at a tie. For each row's largest element: all that are smaller,
    down to what becomes 0. bf16 in fp32, for the interpreter."""
    mantissas = 1 + torch.arange(128) / 128
    numbers = torch.outer(2.0 ** -torch.arange(20), mantissas).flatten()
    states = torch.where(numbers <= mantissas[:, None], numbers, 0.0)
    assert torch.equal(states.amax(-1), mantissas)
    assert_same(states.to(DEVICE))


def assert_same(states: torch.Tensor) -> None:
    found, scale = activation_triton.quantise_rows(states)
    # On a GPU, PyTorch multiplies by the inverse of a number that is no tensor.
    expected, expected_scale = definition.quantise(states.cpu())
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(found.cpu().float(), expected.float())
