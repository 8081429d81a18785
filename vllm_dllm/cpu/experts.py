"""Experts on a CPU, one after the other, each for the rows that chose it; and the kernel of those
in bf16.

Whoever calls `mix` is one PyTorch operation, because the compiler must not trace the loop.
"""

from collections.abc import Callable
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.cpu.compat.expert_kernels import FusedMoEConfig, StockExperts, offer_first
from vllm_dllm.cpu.compilation import cpu_vendor

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""By vLLM's names. PyTorch's use vector instructions. vLLM's operation for CPUs takes each tanh by
itself: in bf16 on one core 9.4 ms for 1,024 rows of 512, as long as half of their products."""


class Projection(NamedTuple):
    """One of an expert's linears."""

    quantize: Callable[[torch.Tensor], Any]
    """Inputs [n, K] -> what `product` takes; its rows can be chosen."""
    product: Callable[[Any, int], torch.Tensor]
    """(Rows, expert) -> [n, N]."""


def mix(
    x: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int, -1 for an expert of another rank
    activation: str,
    gate_up: Projection,  # [2 I, H]
    down: Projection,  # [H, I]
) -> torch.Tensor:
    """Sum over a token's experts of `weight * down(act(gate(x)) * up(x))`, [T, H].

    Between operations, numbers have the model's type, as on GPUs. The sum is in fp32.
    """
    experts = topk_ids.flatten().long()
    order = experts.argsort(stable=True)
    tokens = order // topk_ids.shape[1]
    ends = torch.bincount(experts + 1).cumsum(0).tolist()
    first = ends[0]  # those before it are of other ranks
    own = [
        (e, rows) for e, rows in enumerate(starmap(slice, pairwise(ends))) if rows.stop > rows.start
    ]
    if not own:
        return torch.zeros_like(x)
    inputs = gate_up.quantize(x)
    products = [gate_up.product(inputs[tokens[rows]], expert).to(x.dtype) for expert, rows in own]
    projected = torch.cat(products)
    gate, up = projected.chunk(2, dim=-1)
    inner = down.quantize(ACTIVATIONS[activation](gate).mul_(up))
    products = [
        down.product(inner[rows.start - first : rows.stop - first], expert).to(x.dtype)
        for expert, rows in own
    ]
    weights = topk_weights.flatten()[order[first:], None].float()
    total = torch.zeros(x.shape, dtype=torch.float32)
    return total.index_add_(0, tokens[first:], torch.cat(products) * weights).to(x.dtype)


LEAST_ROWS = 32
"""Of a canvas, for each expert on average. Weights lie as they were loaded, and a product packs
them first: with 8 rows vLLM's kernel is twice as fast."""
LEAST_WORK = 1 << 24
"""Such rows times the weights of one of an expert's matrices. With less, PyTorch's operations are
too small for the time that it takes to call them."""


def bf16_experts(
    x: torch.Tensor,  # [T, H] bf16
    topk_weights: torch.Tensor,  # [T, k] fp32
    topk_ids: torch.Tensor,  # [T, k] int, -1 for an expert of another rank
    activation: str,
    w13: torch.Tensor,  # [E, 2 I, H] bf16
    w2: torch.Tensor,  # [E, H, I] bf16
) -> torch.Tensor:
    """[T, H], see `mix`."""

    def projection(weights: torch.Tensor) -> Projection:
        return Projection(lambda x: x, lambda rows, e: F.linear(rows, weights[e]))

    gate_up, down = projection(w13), projection(w2)
    return mix(x, topk_weights, topk_ids, activation, gate_up, down)


direct_register_custom_op(
    "vllm_dllm_bf16_experts",
    bf16_experts,
    fake_impl=lambda x, *args: torch.empty_like(x),
)


class Bf16Experts(StockExperts):
    """Experts in bf16 on processors of AMD that multiply bf16.

    vLLM's portable kernel multiplies in fp32. AMD's cores multiply bf16 twice as fast, and oneDNN
    has products that do; with them experts take half the time. (Of Intel's, those with AMX have a
    kernel of vLLM's own, and those without multiply bf16 at half of fp32's speed.)
    """

    @staticmethod
    def is_supported_config(
        cls: type, moe_config: FusedMoEConfig, *args: object
    ) -> tuple[bool, str | None]:
        supported, reason = StockExperts.is_supported_config(cls, moe_config, *args)
        return (supported and is_faster(moe_config)), reason or "vLLM's own kernel is faster"

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in ACTIVATIONS

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """They stay as they are."""

    def apply(
        self,
        output: torch.Tensor,  # [T, H], written
        hidden_states: torch.Tensor,  # [T, H]
        w1: torch.Tensor,  # [E, 2 I, H]
        w2: torch.Tensor,  # [E, H, I]
        topk_weights: torch.Tensor,  # [T, k]
        topk_ids: torch.Tensor,  # [T, k]
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,  # this rank's numbers of all experts; -1: another rank's
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: object,
        apply_router_weight_on_input: bool,
    ) -> None:
        if apply_router_weight_on_input:  # vLLM has multiplied the states by them
            topk_weights = torch.ones_like(topk_weights)
        own_ids = topk_ids if expert_map is None else expert_map[topk_ids]
        output.copy_(
            torch.ops.vllm.vllm_dllm_bf16_experts(
                hidden_states, topk_weights, own_ids, activation.value, w1, w2
            )
        )


def is_faster(moe_config: FusedMoEConfig) -> bool:
    """Whether this is faster than vLLM's kernel on this processor, for steps of the current
    configuration's canvases."""
    diffusion = get_current_vllm_config().diffusion_config
    if diffusion is None or moe_config.in_dtype != torch.bfloat16 or moe_config.has_bias:
        return False
    rows = diffusion.canvas_length * moe_config.experts_per_token / moe_config.num_experts
    weights = moe_config.hidden_dim * moe_config.intermediate_size_per_partition
    return (
        torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu._is_amx_tile_supported()
        and cpu_vendor() == "AuthenticAMD"
        and rows >= LEAST_ROWS
        and rows * weights >= LEAST_WORK
    )


def prefer_bf16() -> None:
    """Models that this process builds are offered this kernel first. Repeatable."""
    offer_first(Bf16Experts)
