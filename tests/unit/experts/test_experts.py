"""A mixture of experts and its quantised rows in Triton against their definitions, in the
interpreter where there is no GPU, and the definitions against float64."""

from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.experts import definition, mixture_triton, quantise_triton
from vllm_dllm.experts.definition import Experts

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = (256, 192, 6, 2)  # K, N, E, top_k; in FP8 a pass takes 128 of N, the last one half of it
FULL = (2816, 704, 128, 8)  # of the 26B model
STEP = 2.0**-3  # between neighbours in e4m3, as a share


@pytest.fixture(scope="module")
def fast() -> ModuleType:
    if not torch.cuda.is_available():
        interpret_kernels(mixture_triton)
        interpret_kernels(quantise_triton)
    return mixture_triton


class Problem(NamedTuple):
    states: torch.Tensor
    experts: Experts
    weights: torch.Tensor
    ids: torch.Tensor


def draw(
    tokens: int, dtype: torch.dtype, is_fp8: bool, shape: tuple[int, int, int, int] = SMALL
) -> Problem:
    """The first expert is every token's, and the last one nobody's."""
    hidden, width, num_experts, top_k = shape
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = [normal(num_experts, 2 * width, hidden), normal(num_experts, hidden, width)]
    weights = [weight / weight.shape[-1] ** 0.5 for weight in weights]
    scales = [None, None]
    if is_fp8:
        pairs = [definition.quantise(weight) for weight in weights]
        weights, scales = [pair[0] for pair in pairs], [pair[1][..., 0] for pair in pairs]
    others = normal(tokens, num_experts - 2).topk(top_k - 1).indices + 1
    ids = torch.cat([torch.zeros(tokens, 1, dtype=torch.int64), others], dim=1).int()
    experts = Experts(*(weight if is_fp8 else weight.to(dtype) for weight in weights), *scales)
    experts = Experts(*(None if part is None else part.to(DEVICE) for part in experts))
    states = normal(tokens, hidden).to(dtype)
    found = states, torch.rand(tokens, top_k, generator=generator), ids
    states, shares, ids = (part.to(DEVICE) for part in found)
    return Problem(states, experts, shares, ids)


def run(fast: ModuleType, problem: Problem, size: int, activation: str) -> torch.Tensor:
    states, experts, weights, ids = problem
    output, (rows, scale) = torch.full_like(states, torch.nan), (states, None)
    if experts.down_scale is not None:
        rows, scale = definition.quantise(states)
    num_experts, hidden, width = experts.down.shape
    apart = [states.new_full((ids.numel(), n), torch.nan) for n in (width, hidden)]
    assignment = definition.sort_by_expert(ids, size, num_experts)
    fast.mix_experts(rows, scale, experts, weights, assignment, size, activation, *apart, output)
    return output


def exactly(problem: Problem, activation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64, but for roundings to FP8: the result, the largest sums of magnitudes, and what
    one of a row's numbers in FP8 makes of it that is rounded the other way."""
    states, experts, weights, ids = problem
    is_fp8 = experts.down_scale is not None
    x = definition.round_for_product(states, experts).double()
    found = torch.zeros(3, *states.shape, dtype=torch.float64, device=states.device)
    for token, choices in enumerate(ids.tolist()):
        for weight, expert in zip(weights[token].double(), choices, strict=True):
            gate_up, down = (
                part.double() for part in definition.dequantise_expert(experts, expert)
            )
            gate, up = (gate_up @ x[token]).chunk(2)
            inner = (definition.ACTIVATIONS[activation](gate) * up)[None]
            inner = definition.round_for_product(inner, experts)[0].double()
            found[0, token] += weight * (down @ inner)
            gate, up = (gate_up.abs() @ x[token].abs()).chunk(2)
            found[1, token] += weight * (down.abs() @ (gate * up))
            flip = STEP * inner.abs().amax() * down.abs().amax(-1)
            found[2, token] += weight * flip * is_fp8
    return tuple(found)


@pytest.mark.parametrize(
    ("tokens", "size", "dtype", "is_fp8", "activation"),
    [
        (1, 16, torch.float32, False, "silu"),
        (37, 32, torch.float32, False, "gelu_tanh"),
        (37, 16, torch.float16, False, "gelu_tanh"),
        (1, 16, torch.float16, True, "gelu_tanh"),
        (37, 16, torch.float32, True, "silu"),
        (37, 32, torch.float32, True, "gelu_tanh"),
        (70, 64, torch.float32, True, "gelu_tanh"),
        (100, 80, torch.float32, False, "silu"),
        (150, 144, torch.float32, True, "gelu_tanh"),
    ],
)
def test_experts(
    fast: ModuleType, tokens: int, size: int, dtype: torch.dtype, is_fp8: bool, activation: str
) -> None:
    """37 rows of the first expert take three blocks of 16, or two of 32."""
    problem = draw(tokens, dtype, is_fp8)
    expected, magnitudes, flip = exactly(problem, activation)
    allowed = tolerances.quantised_experts(0.0, dtype) * magnitudes + flip
    tolerances.assert_within(run(fast, problem, size, activation), expected, allowed)
    tolerances.assert_within(definition.mix_experts(*problem, activation), expected, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True], ids=["not quantised", "fp8"])
@pytest.mark.parametrize("size", mixture_triton.SIZES)
def test_full_width_in_bf16_gives_the_same_bits_again(
    fast: ModuleType, size: int, is_fp8: bool
) -> None:
    problem = draw(150, torch.bfloat16, is_fp8, FULL)
    expected, *_ = exactly(problem, "gelu_tanh")
    found, again = (run(fast, problem, size, "gelu_tanh") for _ in range(2))
    share = tolerances.experts_on_average(torch.bfloat16, is_fp8)
    assert rms(found - expected) <= share * rms(expected)
    assert torch.equal(found, again)


def rms(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def test_a_layer_that_the_tiles_do_not_divide_is_refused(fast: ModuleType) -> None:
    assert mixture_triton.find_obstacle(2816, 704, "gelu_tanh") is None
    assert "got 2816 and 100" in mixture_triton.find_obstacle(2816, 100, "silu")
    problem = draw(1, torch.float32, False)
    with pytest.raises(ValueError, match="activation silu or gelu_tanh, got relu2"):
        run(fast, problem, 16, "relu2")


def test_a_block_holds_the_rows_of_most_experts() -> None:
    tokens = (1, 256, 512, 1024, 2048, 4096, 8192)
    sizes = [mixture_triton.block_size(number, 8, 128) for number in tokens]
    assert sizes == [16, 32, 64, 80, 144, 128, 128]


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
