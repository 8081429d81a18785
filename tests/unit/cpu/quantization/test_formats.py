"""Quantised layers and experts on CPUs, and the arithmetic of NVFP4."""

import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.platforms import PlatformEnum

from tests import tolerances
from vllm_dllm.cpu import experts, formats
from vllm_dllm.cpu.compat.kernels import prefer_linear_kernel
from vllm_dllm.cpu.compat.ops import Int8Weights, check_int8_support, int8_sums_are_exact
from vllm_dllm.cpu.quantization.linear import CpuFp8LinearKernel

FP8 = torch.float8_e4m3fn
EXPERTS, HIDDEN, INNER, ROWS, CHOSEN = 4, 64, 32, 19, 2


@pytest.mark.numerics
def test_e4m3_is_read_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(FP8)
    assert torch.equal(formats.fp8_to_fp32(codes), codes.float())


@pytest.mark.numerics
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


@pytest.mark.numerics
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


@pytest.mark.numerics
def test_no_expert_is_of_this_rank() -> None:
    run, _ = of_fp8(torch.float32)
    ids = torch.full((ROWS, CHOSEN), -1, dtype=torch.int32)
    out = run(drawn(ROWS, HIDDEN, seed=5), torch.ones(ROWS, CHOSEN), ids, "gelu_tanh")
    assert torch.equal(out, torch.zeros(ROWS, HIDDEN))


@pytest.mark.numerics
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


@pytest.mark.numerics
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


@pytest.mark.numerics
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
