"""Quantised experts and products on a CPU, in both of the types that models have here."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from tests import tolerances
from vllm_dllm.cpu import experts, formats
from vllm_dllm.cpu.compat.ops import Int8Weights, check_int8_support, int8_sums_are_exact

pytestmark = pytest.mark.numerics

FP8 = torch.float8_e4m3fn
EXPERTS, HIDDEN, INNER, ROWS, CHOSEN = 4, 64, 32, 19, 2


def test_e4m3_is_read_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(FP8)
    assert torch.equal(formats.fp8_to_fp32(codes), codes.float())


def test_int4_is_read_exactly() -> None:
    codes = torch.arange(16).repeat(2, 4)  # [2, 64]
    packed = torch.zeros(2, 8, dtype=torch.int64)
    for place in range(8):
        packed |= codes.view(2, 8, 8)[..., place] << 4 * place
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    scale = torch.tensor([[1.0, 0.5], [3.0, 0.25]])
    expected = (codes - 8) * scale.repeat_interleave(32, 1)
    assert torch.equal(formats.decode_int4(packed, scale), expected)
    assert torch.equal(formats.decode_int4(packed, scale.bfloat16()), expected.bfloat16())


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scaled(
    kind: torch.dtype, size: float
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Of both layers, values and scales, and the matrices they stand for: [E, n, k] float64."""
    limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    stored, meant = [], []
    for n, k, seed in ((2 * INNER, HIDDEN, 0), (HIDDEN, INNER, 10)):
        scale = (drawn(EXPERTS, n, 1, seed=seed).abs() + 0.1) / size
        values = (size * drawn(EXPERTS, n, k, seed=seed + 1)).clamp(limits.min, limits.max).to(kind)
        stored.append((values, scale))
        meant.append(values.double() * scale.double())
    return stored, meant


def of_fp8(dtype: torch.dtype) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    (first, second), meant = scaled(FP8, 100.0)
    return lambda *rows: experts.compute_experts(*rows, "fp8", [*first], [*second]), meant


def of_int8(dtype: torch.dtype) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    stored, meant = scaled(torch.int8, 40.0)
    packed = [Int8Weights(*layer, dtype) for layer in stored]

    def run(*rows: Any) -> torch.Tensor:
        first, second = (
            [each.handles, values[..., :0]]
            for each, (values, _) in zip(packed, stored, strict=True)
        )
        return experts.compute_experts(*rows, "int8", first, second)

    return run, meant


def of_int4(dtype: torch.dtype) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    def weights(n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        packed = torch.randint(-(2**31), 2**31, (EXPERTS, n, k // 8), generator=generator)
        scale = ((drawn(EXPERTS, n, k // 32, seed=seed).abs() + 0.1) / 4).to(dtype)
        packed = packed.to(torch.int32)
        each = [formats.decode_int4(*pair) for pair in zip(packed, scale, strict=True)]
        return packed, scale, torch.stack(each).double()

    *first, up = weights(2 * INNER, HIDDEN, 0)
    *second, down = weights(HIDDEN, INNER, 10)
    return lambda *rows: experts.compute_experts(*rows, "int4", first, second), [up, down]


# (what is served, by what share of a row's largest number its inputs are rounded)
FORMATS: dict[str, tuple[Callable[..., Any], float]] = {
    "fp8": (of_fp8, 2.0**-4),
    "int8": (of_int8, 1 / 254),
    "int4": (of_int4, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_experts(name: str, dtype: torch.dtype) -> None:
    """Against float64, element by element as if all roundings went the same way, and on average."""
    build, step = FORMATS[name]
    if name == "int8" and not int8_sums_are_exact():
        with pytest.raises(ValueError, match="need a processor with VNNI"):
            check_int8_support()
        return
    run, (gate_up, down) = build(dtype)
    x = drawn(ROWS, HIDDEN, seed=5).to(dtype)
    weights = drawn(ROWS, CHOSEN, seed=6).abs()
    order = drawn(ROWS, EXPERTS, seed=7).argsort(-1)
    ids = order[:, :CHOSEN].to(torch.int32)
    ids[0, 0] = -1  # of another rank
    found = run(x, weights, ids, "gelu_tanh").double()

    expected, largest = (torch.zeros(ROWS, HIDDEN, dtype=torch.float64) for _ in range(2))
    for row, choice in product(range(ROWS), range(CHOSEN)):
        if (expert := int(ids[row, choice])) < 0:
            continue
        weight, own = weights[row, choice].double(), x[row].double()
        gate, up = (gate_up[expert] @ own).chunk(2)
        hidden = torch.nn.functional.gelu(gate, approximate="tanh") * up
        expected[row] += weight * (down[expert] @ hidden)
        gate, up = (gate_up[expert].abs().sum(-1) * own.abs().amax()).chunk(2)
        largest[row] += weight * down[expert].abs().sum(-1) * (gate * up).amax()
    share = tolerances.quantised_experts(step, dtype)
    tolerances.assert_within(found, expected, share * largest)
    off = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 0 < off < share


def test_no_expert_is_of_this_rank() -> None:
    run, _ = of_fp8(torch.float32)
    ids = torch.full((ROWS, CHOSEN), -1, dtype=torch.int32)
    out = run(drawn(ROWS, HIDDEN, seed=5), torch.ones(ROWS, CHOSEN), ids, "gelu_tanh")
    assert torch.equal(out, torch.zeros(ROWS, HIDDEN))


def test_int8_is_tried_in_a_bf16_model_as_in_any() -> None:
    """The processor is asked while a model is made, whose type is then the default of new tensors.
    Int8 checkpoints in bf16 did not start."""
    expected = int8_sums_are_exact()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert int8_sums_are_exact.__wrapped__() == expected
    finally:
        torch.set_default_dtype(before)
