"""Our experts in the place of vLLM's kernel, called as vLLM calls it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    make_moe_prepare_and_finalize_no_dp_ep,
)

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.compat import experts
from vllm_dllm.compat.experts import ExpertCall
from vllm_dllm.experts import definition, mixture_triton, quantise_triton
from vllm_dllm.measured import expert_kernels

pytestmark = pytest.mark.numerics

EXPERTS, HIDDEN, WIDTH, CHOSEN = 4, 128, 64, 2


class QuantMethod:
    """As vLLM has it: it makes a kernel of weights that were loaded, also of those that it has
    loaded again."""

    moe_kernel: modular_kernel.FusedMoEKernel

    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_kernel = modular_kernel.FusedMoEKernel(
            make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False),
            TritonExperts(layer.moe_config, FUSED_MOE_UNQUANTIZED_CONFIG),
        )

    def apply(self, layer: Any, x: torch.Tensor, weights: Any, ids: Any, *_: None) -> torch.Tensor:
        gate_up, down, activation = layer.w13_weight, layer.w2_weight, layer.activation
        found: torch.Tensor = self.moe_kernel.apply(
            x, gate_up, down, weights, ids, activation, -1, None, False
        )
        return found


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose kernel is vLLM's, on a CPU, where `moe_align_block_size` is missing."""
    interpret_kernels(mixture_triton)
    monkeypatch.setattr(
        experts, "moe_align_block_size", lambda *given, **_: definition.sort_by_expert(*given)
    )
    monkeypatch.setattr(experts, "find_expert_layers", lambda modules: modules)
    monkeypatch.setattr(experts, "tiles_file_name", lambda layer: "a.json")
    config = FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
        hidden_dim=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.GELU_TANH,
        device="cpu",
        routing_method=RoutingMethodType.Unspecified,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.float32,
    )
    torch.manual_seed(0)
    layer = SimpleNamespace(
        w13_weight=torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
        w2_weight=torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5,
        params_dtype=torch.float32,
        activation=MoEActivation.GELU_TANH,
        expert_map=None,
        apply_router_weight_on_input=False,
        moe_config=config,
    )

    layer.quant_method = QuantMethod()
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def assert_right(layer: Any, states: torch.Tensor, found: torch.Tensor) -> None:
    """Of experts that take turns."""
    turns = torch.arange(len(states) * CHOSEN) % EXPERTS
    weights = torch.full((len(states), CHOSEN), 1 / CHOSEN)
    own = definition.Experts(layer.w13_weight, layer.w2_weight)
    expected = definition.mix_experts(states, own, weights, turns.view(-1, CHOSEN), "gelu_tanh")
    share = 2 * tolerances.product(HIDDEN) + tolerances.product(WIDTH) + tolerances.SHORT
    size = layer.w2_weight.abs().sum(-1).max().item()
    torch.testing.assert_close(found, expected, **tolerances.within(share, size))


def test_vllm_calls_ours(layer: Any) -> None:
    states = torch.randn(12, HIDDEN)
    assert expert_kernels.block_size(layer, len(states)) == 16
    assert_right(layer, states, expert_kernels.run_layer(layer, 16, states))
    assert "apply" not in vars(layer.quant_method.moe_kernel.fused_experts), "vLLM's own again"


@pytest.mark.parametrize("size", mixture_triton.SIZES)
def test_memory_holds_whole_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A program reads the rows of its block before it knows whether there are any."""
    monkeypatch.setattr(ops, "moe_align_block_size", lambda *_: None)  # which only CUDA builds have
    others = dict.fromkeys(ExpertCall.__dataclass_fields__)
    for tokens in (1, 3, 37, 257, 1024, 2048, 4096):
        ids = torch.zeros(tokens, 8, dtype=torch.int32)
        call = ExpertCall(**others | {"ids": ids, "down": torch.empty(128, 0, 0)})
        rows, blocks, _ = call.align_blocks(size)
        assert len(rows) == len(blocks) * size


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("activation", MoEActivation.RELU2),
        ("expert_map", torch.zeros(EXPERTS)),
        ("apply_router_weight_on_input", True),
        ("params_dtype", torch.float16),
        ("w2_weight", torch.zeros(EXPERTS, WIDTH, HIDDEN).mT),
    ],
)
def test_what_it_cannot_compute_is_not_tried(layer: Any, attribute: str, value: Any) -> None:
    setattr(layer, attribute, value)
    assert expert_kernels.block_size(layer, 12) == 0
    expert_kernels.install_kernels([layer], {"a.json": {"8": 16}})
    assert "apply" not in vars(layer.quant_method.moe_kernel.fused_experts)


def test_steps_go_as_the_nearest_that_was_timed(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, stock = [], []
    kernel = layer.quant_method.moe_kernel.fused_experts
    mix = mixture_triton.mix_experts

    def mixed(*args: Any, size: int, **options: Any) -> None:
        sizes.append(size)
        mix(*args, size=size, **options)

    monkeypatch.setattr(mixture_triton, "mix_experts", mixed)
    monkeypatch.setattr(TritonExperts, "apply", lambda *_, **call: stock.append(call["output"]))
    expert_kernels.install_kernels([layer], {"a.json": {"8": 16, "64": 0}})
    assert sizes == [16], "compiled before the first request"
    for tokens, ours in ((3, True), (30, True), (50, False), (300, False)):
        sizes.clear(), stock.clear()
        states = torch.randn(tokens, HIDDEN)
        found = experts.run_with_tiles(layer, None, states)
        assert (len(sizes), len(stock)) == (ours, not ours)
        if ours:
            assert_right(layer, states, found)
    assert "apply" in vars(kernel)
    unchanged = vars(layer.quant_method.moe_kernel.prepare_finalize)
    assert "prepare" not in unchanged, "nothing is quantised"


def test_weights_that_are_loaded_again_run_ours(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as they are, until vLLM's kernel is set again."""
    stock: list[Any] = []
    monkeypatch.setattr(TritonExperts, "apply", lambda *_, **call: stock.append(call))
    expert_kernels.install_kernels([layer], {"a.json": {"8": 16}})
    stock.clear()
    for _ in range(2):
        before = layer.quant_method.moe_kernel
        layer.w2_weight = layer.w2_weight.flip(0)
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.quant_method.moe_kernel is not before
        states = torch.randn(12, HIDDEN)
        assert_right(layer, states, experts.run_with_tiles(layer, None, states))
    assert not stock
    experts.reset_expert_kernel(layer)
    layer.quant_method.process_weights_after_loading(layer)
    experts.run_with_tiles(layer, None, torch.randn(12, HIDDEN))
    assert stock


def quantise_weights(*shapes: tuple[int, int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each with its scales [E, channels, 1], as vLLM has them."""
    for shape in shapes:
        yield definition.quantise(torch.randn(EXPERTS, *shape) / shape[1] ** 0.5)


def test_vllm_prepares_fp8_with_our_quantisation(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its own kernel and for ours."""
    interpret_kernels(quantise_triton)
    (gate_up, gate_up_scale), (down, down_scale) = quantise_weights(
        (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    )
    layer.w13_weight, layer.w2_weight = gate_up, down
    kernel = layer.quant_method.moe_kernel
    kernel.fused_experts.quant_config = fp8_w8a8_moe_quant_config(
        gate_up_scale, down_scale, per_act_token_quant=True, per_out_ch_quant=True
    )
    given, compute = [], expert_kernels._compute

    def computed(size: int, call: ExpertCall) -> bool:
        given.append((call.states, call.state_scale))
        call.output.zero_()
        return not size or compute(size, call)

    monkeypatch.setattr(expert_kernels, "_compute", computed)
    expert_kernels.install_kernels([layer], {"a.json": {"8": 16, "64": 0}})
    for tokens in (12, 64):
        given.clear()
        states = torch.randn(tokens, HIDDEN)
        found = experts.run_with_tiles(layer, None, states)
        ((rows, scale),) = given
        expected, expected_scale = definition.quantise(states)
        assert rows.dtype == definition.FP8 and torch.equal(rows.float(), expected.float())
        assert torch.equal(scale, expected_scale)
        if tokens == 12:
            turns = torch.arange(tokens * CHOSEN) % EXPERTS
            shares = torch.full((tokens, CHOSEN), 1 / CHOSEN)
            own = definition.Experts(gate_up, down, gate_up_scale[..., 0], down_scale[..., 0])
            ids = turns.view(-1, CHOSEN)
            assert_close_in_fp8(
                found, definition.mix_experts(states, own, shares, ids, "gelu_tanh")
            )
    experts.reset_expert_kernel(layer)
    assert "prepare" not in vars(kernel.prepare_finalize)


def assert_close_in_fp8(found: torch.Tensor, expected: torch.Tensor) -> None:
    off = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert off <= tolerances.experts_on_average(torch.float32, is_fp8=True)
