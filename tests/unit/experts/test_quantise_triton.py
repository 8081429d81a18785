"""Quantisation against the definition, in Triton's interpreter where there is no GPU."""

import pytest
import torch

from attention_kernels.interpreter import interpret_kernels
from vllm_dllm.experts import definition, quantise_triton

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted() -> None:
    if not torch.cuda.is_available():
        interpret_kernels(quantise_triton)


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
    found, scale = quantise_triton.quantise_rows(states)
    # On a GPU, PyTorch multiplies by the inverse of a number that is no tensor.
    expected, expected_scale = definition.quantise(states.cpu())
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(found.cpu().float(), expected.float())
