"""FP8 linears whose kernel is chosen when the model is compiled already."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)

from tests import tolerances
from vllm_dllm.compat.fp8_linears import (
    OpenFp8Linear,
    Product,
    open_fp8_linears,
    opened_fp8_linears,
)
from vllm_dllm.measured import fp8_linears
from vllm_dllm.measured.stopwatch import Stopwatch

INNER, OUTER = 64, 48
FP8 = torch.float8_e4m3fn
PARAMETERS = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
SHAPE = f"{INNER}x{OUTER}"


class Linear(LinearBase):
    """What vLLM makes of compressed-tensors' FP8-dynamic, on a GPU with CUTLASS."""

    def __init__(self, outer: int = OUTER, weights: Any = kFp8StaticChannelSym) -> None:
        torch.nn.Module.__init__(self)
        stored = torch.randn(outer, INNER)
        self.exact = stored.to(FP8).float()
        self.weight = torch.nn.Parameter(stored.to(FP8).t(), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.rand(outer, 1) + 0.5, requires_grad=False)
        self.input_size, self.quant_method = INNER, None  # of a linear that each rank has whole
        config = FP8ScaledMMLinearLayerConfig(
            weights, kFp8DynamicTokenSym, (outer, INNER), torch.float32, torch.float32
        )
        kernel = CutlassFP8ScaledMMLinearKernel(config, PARAMETERS)
        self.scheme = SimpleNamespace(fp8_linear=kernel)
        kernel.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.fp8_linear.apply_weights(self, x)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which kernel multiplied, one product after the other; each computes as floats do."""
    calls: list[str] = []
    for name in fp8_linears.CANDIDATES:

        def multiply(product: Product, name: str = name) -> torch.Tensor:
            calls.append(name)
            a, a_scale, b, b_scale, _, dtype = product
            return ((a.float() * a_scale) @ (b.float() * b_scale.view(1, -1))).to(dtype)

        monkeypatch.setitem(fp8_linears.CANDIDATES, name, multiply)
    monkeypatch.setattr(
        CutlassFP8ScaledMMLinearKernel, "is_supported", classmethod(lambda *_: (True, None))
    )
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        yield calls
    fp8_linears.use_kernels({})


def assert_right(linear: Linear, x: torch.Tensor, found: torch.Tensor) -> None:
    """Of rows that FP8 holds exactly: their largest element is its largest."""
    expected = x @ (linear.exact * linear.weight_scale).T
    size = (x.abs() @ (linear.exact * linear.weight_scale).abs().T).max().item()
    torch.testing.assert_close(
        found, expected, **tolerances.within(tolerances.product(INNER), size)
    )


def rows(number: int) -> torch.Tensor:
    x = torch.randn(number, INNER).to(FP8).float()
    x[:, 0] = torch.finfo(FP8).max
    return x


def test_a_compiled_step_runs_what_was_fastest_for_its_rows(calls: list[str]) -> None:
    linear = Linear()
    open_fp8_linears([linear])
    assert [*opened_fp8_linears([linear])] == [linear]
    step = torch.compile(linear, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for chosen in (
            {"8x8": {"4": "Triton"}},
            {SHAPE: {"4": "Triton", "16": "PyTorch"}},
            {SHAPE: {"4": "CUTLASS"}},
        ):
            fp8_linears.use_kernels(chosen)
            for number in (3, 9, 11, 40):
                x = rows(number)
                assert_right(linear, x, step(x))
    assert calls == ["CUTLASS"] * 4 + ["Triton", "Triton", "PyTorch", "PyTorch"] + ["CUTLASS"] * 4


def test_others_are_left_alone() -> None:
    padded, by_tensor, other = Linear(), Linear(weights=kFp8StaticTensorSym), Linear()
    padded.input_size_per_partition = INNER - 1
    other.scheme.fp8_linear = object()
    modules = [padded, by_tensor, other, torch.nn.Identity()]
    open_fp8_linears(modules)
    assert [*opened_fp8_linears(modules)] == []


def test_modelopt_s_linears_are_opened() -> None:
    linear = Linear()
    linear.quant_method = SimpleNamespace(kernel=linear.scheme.fp8_linear)
    del linear.scheme
    open_fp8_linears([linear])
    assert [*opened_fp8_linears([linear])] == [linear]


def test_what_vllm_loads_again_stays_open() -> None:
    """vLLM prepares weights anew that a sleep has discarded."""
    linear = Linear()
    open_fp8_linears([linear])
    kernel = linear.scheme.fp8_linear
    assert type(kernel) is OpenFp8Linear
    kernel.process_weights_after_loading(linear)
    x = rows(5)
    assert_right(linear, x, linear(x))


def test_each_shape_and_number_of_rows_gets_its_fastest(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one shape are timed once, and a tie leaves CUTLASS."""
    linears = [Linear(), Linear(), Linear(outer=32)]
    open_fp8_linears(linears)
    ms = {"CUTLASS": 1.0, "PyTorch": 0.99, "Triton": 1.5}
    faster = {"CUTLASS": 1.0, "PyTorch": 1.1, "Triton": 0.8}

    def clock(run: Any) -> float:
        is_small = len(run.args[0].a) == 4
        run()
        return (faster if is_small else ms)[calls[-1]]

    found = fp8_linears.measure_fp8_linears(linears, torch.bfloat16, (4, 16), Stopwatch(clock))
    fastest = {"4": "Triton", "16": "CUTLASS"}
    assert found == (
        {SHAPE: fastest, f"{INNER}x32": fastest},
        ["2 of 4 FP8 linears 1.25 to 1.25 times"],
    )
    assert len(calls) == 2 * 2 * 3 * 2, "each candidate of each is compared and timed"


def test_what_could_not_be_timed_runs_cutlass() -> None:
    linear = Linear()
    open_fp8_linears([linear])
    stopwatch = Stopwatch(lambda run: 1.0, until=0)
    assert fp8_linears.measure_fp8_linears([linear], torch.bfloat16, (4,), stopwatch) == ({}, [])


def test_pytorch_multiplies_rows_by_channels() -> None:
    linear = Linear()
    x, scale = rows(16), torch.rand(16, 1) + 0.5
    found = fp8_linears.multiply_by_pytorch(
        Product(x.to(FP8), scale, linear.weight, linear.weight_scale, None, torch.float32)
    )
    assert_right(linear, x * scale, found)
