"""Experts on a CPU, computed one after the other for the tokens routed to each. Quantised ones are
unpacked one at a time for the rows they get.

All of a layer are one PyTorch operation, because the compiler must not trace the loop.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.cpu import formats
from vllm_dllm.cpu.compat.kernels import FusedMoEConfig, StockExperts
from vllm_dllm.cpu.compat.ops import multiply_int8, quantize_to_int8
from vllm_dllm.cpu.cores import cpu_vendor
from vllm_dllm.cpu.formats import Scaled

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""vLLM's name -> PyTorch's function, which uses vector instructions. vLLM's operation for CPUs
computes each tanh by itself: in bf16 on one core 9.4 ms for 1,024 rows of 512, half as long as
their matrix products."""


class Projection(NamedTuple):
    """How to multiply rows by one matrix of each expert, such as the down projections."""

    quantize: Callable[[torch.Tensor], Any]
    """Inputs [n, K] -> the form that `product` takes, whose rows can be indexed."""
    product: Callable[[Any, int], torch.Tensor]
    """(Rows, expert) -> products [n, N]."""


# Each of the following functions returns the Projection of one matrix [N, K] of each of E experts.
# `dtype` is the model's.


def bf16_projection(
    dtype: torch.dtype,
    weights: torch.Tensor,  # [E, N, K] bf16
) -> Projection:
    """Nothing is quantised."""
    return Projection(lambda x: x, lambda rows, expert: F.linear(rows, weights[expert]))


def fp8_projection(
    dtype: torch.dtype,
    weights: torch.Tensor,  # [E, N, K] float8_e4m3fn
    scales: torch.Tensor,  # [E, N, 1] fp32
) -> Projection:
    """Inputs are quantised row by row."""

    def decode(expert: int) -> Scaled:
        return formats.decode_fp8(weights[expert], scales[expert])

    return _multiply_scaled(dtype, formats.quantize_fp8, decode)


def nvfp4_projection(
    dtype: torch.dtype,
    weights: torch.Tensor,  # [E, N, K / 2] uint8
    block_scales: torch.Tensor,  # [E, N, K / 16] float8_e4m3fn
    scales: torch.Tensor,  # [E] fp32, multiplies
    input_scale: torch.Tensor,  # [] fp32, divides
) -> Projection:
    """Inputs are quantised by `input_scale`, their global scale."""

    def decode(expert: int) -> Scaled:
        return formats.decode_nvfp4(weights[expert], block_scales[expert], scales[expert])

    return _multiply_scaled(dtype, lambda x: formats.quantize_nvfp4(x, input_scale), decode)


def _multiply_scaled(
    dtype: torch.dtype,
    quantize: Callable[[torch.Tensor], Scaled],
    decode: Callable[[int], Scaled],  # expert -> its weights
) -> Projection:
    """Returns the projection that multiplies inputs from `quantize` and weights from `decode` in
    the type that is fastest for `dtype`, the model's."""
    return Projection(
        lambda x: quantize(x).to_model_dtype(dtype),
        lambda rows, expert: formats.multiply(rows, decode(expert).to_model_dtype(dtype)),
    )


def int8_projection(
    dtype: torch.dtype,
    handles: torch.Tensor,  # [E] int64, see `ops.Int8Weights`
    weights: torch.Tensor,  # [E, N, 0]; oneDNN has the numbers
) -> Projection:
    """Inputs are quantised row by row."""

    def multiply(rows: Scaled, expert: int) -> torch.Tensor:
        out = torch.empty(len(rows.values), weights.shape[1], dtype=dtype)
        return multiply_int8(rows.values, rows.scale, handles[expert], out)

    return Projection(lambda x: Scaled(*quantize_to_int8(x)), multiply)


def int4_projection(
    dtype: torch.dtype,
    weights: torch.Tensor,  # [E, N, K / 8] int32
    scales: torch.Tensor,  # [E, N, K / group], of the model's type
) -> Projection:
    """Inputs are not quantised."""
    return Projection(
        lambda x: x,
        lambda rows, expert: rows @ formats.decode_int4(weights[expert], scales[expert]).t(),
    )


PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "bf16": bf16_projection,
    "fp8": fp8_projection,
    "nvfp4": nvfp4_projection,
    "int8": int8_projection,
    "int4": int4_projection,
}


def compute_experts(
    x: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int, -1 for an expert of another rank
    activation: str,
    number_format: str,
    w13: list[torch.Tensor],
    w2: list[torch.Tensor],
) -> torch.Tensor:
    """Returns the sum over a token's experts of `weight * down(act(gate(x)) * up(x))`, [T, H].
    Experts of other ranks add nothing. `activation`: a key of `ACTIVATIONS`. `number_format`: a key
    of `PROJECTIONS`. `w13` and `w2`: the tensors that its function takes, of matrices [2 I, H] and
    [H, I].

    Intermediate results have the model's type, as on GPUs. The sum is in fp32, and the result has
    the type of `x`.
    """
    make = PROJECTIONS[number_format]
    gate_up, down = make(x.dtype, *w13), make(x.dtype, *w2)
    experts = topk_ids.flatten().long()
    order = experts.argsort(stable=True)
    tokens = order // topk_ids.shape[1]
    ends = torch.bincount(experts + 1).cumsum(0).tolist()
    first = ends[0]  # rows before it belong to experts of other ranks
    own = [(expert, a, b) for expert, (a, b) in enumerate(pairwise(ends)) if b > a]
    if not own:
        return torch.zeros_like(x)
    inputs = gate_up.quantize(x)
    products = [gate_up.product(inputs[tokens[a:b]], expert).to(x.dtype) for expert, a, b in own]
    gate, up = torch.cat(products).chunk(2, dim=-1)
    inner = down.quantize(ACTIVATIONS[activation](gate).mul_(up))
    products = [
        down.product(inner[a - first : b - first], expert).to(x.dtype) for expert, a, b in own
    ]
    weights = topk_weights.flatten()[order[first:], None].float()
    total = torch.zeros(x.shape, dtype=torch.float32)
    return total.index_add_(0, tokens[first:], torch.cat(products) * weights).to(x.dtype)


direct_register_custom_op(
    "vllm_dllm_experts", compute_experts, fake_impl=lambda x, *args: torch.empty_like(x)
)


MIN_ROWS = 32
"""Least rows of a canvas per expert, on average, for which `Bf16Experts` is faster. A product packs
the weights first: with 8 rows vLLM's kernel is twice as fast."""
MIN_WORK = 1 << 24
"""Least product of those rows and the weights of one of an expert's matrices. With less, calling
PyTorch's operations takes longer than computing them."""


class Bf16Experts(StockExperts):
    """Experts in bf16 on processors of AMD that multiply bf16.

    vLLM's portable kernel multiplies in fp32. AMD's cores multiply bf16 twice as fast, and so do
    oneDNN's products there; with them experts take half the time. (Intel's processors with AMX have
    a kernel of vLLM's own, and those without multiply bf16 at half of fp32's speed.)
    """

    @staticmethod
    def is_supported_config(
        cls: type, moe_config: FusedMoEConfig, *args: object
    ) -> tuple[bool, str | None]:
        """Returns whether vLLM should choose this kernel, and why not if it should not."""
        supported, reason = StockExperts.is_supported_config(cls, moe_config, *args)
        is_chosen = supported and is_faster_than_stock(moe_config)
        return is_chosen, reason or "vLLM's own kernel is faster"

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in ACTIVATIONS

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing: the weights are used as they were loaded."""

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
        """Writes the experts' output [T, H] to `output`. Does not use the workspaces."""
        if apply_router_weight_on_input:  # vLLM has already multiplied the inputs by the weights
            topk_weights = torch.ones_like(topk_weights)
        own_ids = topk_ids if expert_map is None else expert_map[topk_ids]
        output.copy_(
            torch.ops.vllm.vllm_dllm_experts(
                hidden_states, topk_weights, own_ids, activation.value, "bf16", [w1], [w2]
            )
        )


def is_faster_than_stock(moe_config: FusedMoEConfig) -> bool:
    """Whether `Bf16Experts` is faster than vLLM's kernel on this processor, for steps of the
    current configuration's canvases. False for other models, other types and layers with biases."""
    diffusion = get_current_vllm_config().diffusion_config
    if diffusion is None or moe_config.in_dtype != torch.bfloat16 or moe_config.has_bias:
        return False
    rows = diffusion.canvas_length * moe_config.experts_per_token / moe_config.num_experts
    weights = moe_config.hidden_dim * moe_config.intermediate_size_per_partition
    return (
        torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu._is_amx_tile_supported()
        and cpu_vendor() == "AuthenticAMD"
        and rows >= MIN_ROWS
        and rows * weights >= MIN_WORK
    )
