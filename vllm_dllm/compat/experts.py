"""vLLM's MoE kernels: which layers run them, their tile sizes, and how to run another first. Also
how its BailingMoeV2 routes tokens to experts."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
from vllm.model_executor.layers.fused_moe.experts.triton_cutlass_moe import TritonOrCutlassExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import (
    get_config_file_name,
    get_moe_configs,
    try_get_optimal_moe_config,
)
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from vllm_dllm.compat.patching import temporarily_patch

Tiles = Mapping[str, int]
"""Tile sizes for one number of rows, by vLLM's names in its tuning files."""


AS_LOADED = (TritonExperts, CutlassExpertsFp8, TritonOrCutlassExperts)
"""Kernels of vLLM's that leave weights as they were loaded: [E, 2 * N, K] and [E, K, N]."""


@dataclass(frozen=True)
class ExpertCall:
    """Arguments of a layer's experts: T tokens with top_k of E experts each, K hidden channels, N
    intermediate channels. Tensors are vLLM's own."""

    states: torch.Tensor  # [T, K] the model's type, or e4m3
    state_scale: torch.Tensor | None  # [T, 1] fp32
    gate_up: torch.Tensor  # [E, 2 * N, K]
    down: torch.Tensor  # [E, K, N]
    scales: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]  # of both, per output channel
    weights: torch.Tensor  # [T, top_k]
    ids: torch.Tensor  # [T, top_k] int
    activation: str
    output: torch.Tensor  # [T, K]
    inner: torch.Tensor  # [T * top_k, N] to work in; may share memory with `output`
    rows: torch.Tensor  # [T * top_k, K] to work in

    def align_blocks(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns rows sorted by expert in blocks of `size`, the expert of each block, and the
        number of rows with padding, as vLLM's `moe_align_block_size` does. All are on the
        device."""
        # Else the last block, which no rows are left for, may end behind the memory.
        return moe_align_block_size(self.ids, size, len(self.down), pad_sorted_ids=True)


def find_expert_layers(modules: Iterable[Any]) -> Iterator[RoutedExperts]:
    """Yields the layers with a kernel in `AS_LOADED` that exchange no tokens with other ranks."""
    for module in modules:
        if not isinstance(module, RoutedExperts):
            continue
        kernel = getattr(module.quant_method, "moe_kernel", None)
        apart = module.moe_config.moe_parallel_config.use_all2all_kernels
        if type(getattr(kernel, "fused_experts", None)) in AS_LOADED and not apart:
            yield module


def has_tunable_tiles(layer: RoutedExperts) -> bool:
    """Whether the layer's tile sizes can be chosen after the weights are loaded."""
    return type(layer.quant_method.moe_kernel.fused_experts) is TritonExperts


def is_two_products(layer: RoutedExperts) -> bool:
    """Whether the layer is two matrix products and an activation, without biases or clamps, with
    all experts on this rank, and unquantised or in FP8 with scales per output channel and token."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    config = kernel.quant_config
    by_channel = config.use_fp8_w8a8 and config.per_act_token_quant and config.per_out_ch_quant
    changed = (config.w1_bias, config.w2_bias, config.gemm1_clamp_limit, config.gemm1_alpha)
    weights = (layer.w13_weight, layer.w2_weight)
    return (
        ((config.quant_dtype is None and layer.w2_weight.dtype == layer.params_dtype) or by_channel)
        and config.a1_scale is None
        and all(each is None for each in (*changed, layer.expert_map))
        and all(weight.is_contiguous() for weight in weights)
        and not layer.apply_router_weight_on_input
        and not layer.moe_config.is_lora_enabled
    )


def set_expert_kernel(
    layer: RoutedExperts,
    run: Callable[[ExpertCall], bool],
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Makes `run` compute `layer`, for which `is_two_products`, from now on, also when its weights
    are loaded again: vLLM then makes a new kernel for those in FP8.

    Args:
        run: writes `output` of its argument and returns True, or returns False to have vLLM's
            kernel compute.
        quantise: called with the tokens' states [T, K] in FP8. Returns e4m3 [T, K] and scales
            [T, 1] fp32, which `run` or vLLM's kernel reads.
    """
    reset_expert_kernel(layer)
    method = layer.quant_method
    kernel, preparation = method.moe_kernel.fused_experts, method.moe_kernel.prepare_finalize
    apply, process = kernel.apply, method.process_weights_after_loading

    def process_and_set(*args: Any) -> None:
        process(*args)
        set_expert_kernel(layer, run, quantise)

    def run_or_apply(**call: Any) -> Any:
        return None if run(_make_call(kernel, call)) else apply(**call)

    def prepare(states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Returns quantised states, and None for what would say how ranks share tokens."""
        return *quantise(states.contiguous()), None, None, None

    kernel.apply, method.process_weights_after_loading = run_or_apply, process_and_set
    # Other ways to prepare send tokens to other ranks.
    is_alone = type(preparation) is MoEPrepareAndFinalizeNoDPEPModular
    if kernel.quant_config.use_fp8_w8a8 and is_alone:
        preparation.prepare = prepare


def reset_expert_kernel(layer: RoutedExperts) -> None:
    """Makes vLLM's kernels compute and quantise alone again."""
    vars(layer.quant_method).pop("process_weights_after_loading", None)
    vars(layer.quant_method.moe_kernel.fused_experts).pop("apply", None)
    vars(layer.quant_method.moe_kernel.prepare_finalize).pop("prepare", None)


def _make_call(kernel: Any, call: Mapping[str, Any]) -> ExpertCall:
    """Returns the keyword arguments of vLLM's kernel as an ExpertCall with the same memory."""
    config, (_, hidden, width) = kernel.quant_config, call["w2"].shape
    num_rows = call["topk_ids"].numel()

    def room(workspace: torch.Tensor, channels: int) -> torch.Tensor:
        return workspace.flatten()[: num_rows * channels].view(num_rows, channels)

    return ExpertCall(
        states=call["hidden_states"],
        state_scale=call["a1q_scale"],
        gate_up=call["w1"],
        down=call["w2"],
        scales=(config.w1_scale, config.w2_scale),
        weights=call["topk_weights"],
        ids=call["topk_ids"],
        activation=call["activation"].value,
        output=call["output"],
        inner=room(call["workspace13"], width),
        rows=room(call["workspace2"], hidden),
    )


def tiles_file_name(layer: RoutedExperts) -> str:
    """Returns the name of the file in which vLLM looks for the layer's tile sizes."""
    experts, _, width = layer.w2_weight.shape
    kernel = layer.quant_method.moe_kernel.fused_experts
    return get_config_file_name(experts, width, _type_name(layer), kernel.block_shape)


def tiles_in_use(layer: RoutedExperts, rows: int) -> dict[str, int]:
    """Returns the tile sizes that vLLM uses now when the layer computes `rows` rows."""
    shapes = layer.w13_weight.size(), layer.w2_weight.size()
    top_k, kernel = layer.moe_config.experts_per_token, layer.quant_method.moe_kernel.fused_experts
    return {
        **try_get_optimal_moe_config(*shapes, top_k, _type_name(layer), rows, kernel.block_shape)
    }


def run_with_tiles(layer: RoutedExperts, tiles: Tiles | None, rows: torch.Tensor) -> torch.Tensor:
    """Runs the layer on `rows` [T, K], with tokens spread evenly over experts, and returns its
    output [T, K]. Does not wait for the device. `tiles` None: the tile sizes in use."""
    config = layer.moe_config
    shape = len(rows), config.experts_per_token
    turns = torch.arange(shape[0] * shape[1], dtype=torch.int32, device=rows.device)
    ids = (turns % config.num_experts).view(shape)
    weights = torch.full(shape, 1 / config.experts_per_token, device=rows.device)
    with contextlib.nullcontext() if tiles is None else override_config(dict(tiles)):
        return layer.quant_method.apply(layer, rows, weights, ids, None, None)


def clear_tiles_cache() -> None:
    """Makes vLLM read its files of tile sizes again when it next looks for some."""
    get_moe_configs.cache_clear()


def _type_name(layer: RoutedExperts) -> str | None:
    """Returns vLLM's name of the weights' type in names of tuning files; None: unquantised."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    return kernel.quant_config.config_name(layer.params_dtype)


@contextlib.contextmanager
def use_routing_function(choose: Callable[..., Any]) -> Iterator[None]:
    """Makes layers that are built in this context route tokens by `choose`, which gets the
    arguments of vLLM's `custom_routing_function` and, as `bias`, the layer's bias."""

    def make_factory(stock: Any) -> Any:
        def make_experts(*, e_score_correction_bias: torch.Tensor, **options: Any) -> Any:
            options |= {
                "custom_routing_function": partial(choose, bias=e_score_correction_bias),
                "use_grouped_topk": False,
                "num_expert_group": None,
                "topk_group": None,
            }
            return stock(**options)

        return make_experts

    with temporarily_patch("model_executor.models.bailing_moe:FusedMoEFactory", make_factory):
        yield
