"""The Triton kernel of vLLM's experts, and the tiles it runs with."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import (
    get_config_file_name,
    get_moe_configs,
    try_get_optimal_moe_config,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

Tiles = Mapping[str, int]
"""Of one number of rows, as vLLM's files have them."""


def layers_with_tiles(modules: Iterable[Any]) -> Iterator[RoutedExperts]:
    """Experts whose tiles can be chosen after the weights are loaded: those of vLLM's Triton kernel
    that talk to no other rank."""
    for module in modules:
        if not isinstance(module, RoutedExperts):
            continue
        kernel = getattr(module.quant_method, "moe_kernel", None)
        apart = module.moe_config.moe_parallel_config.use_all2all_kernels
        if type(getattr(kernel, "fused_experts", None)) is TritonExperts and not apart:
            yield module


def tiles_file(layer: RoutedExperts) -> str:
    """The name of the file in which vLLM looks for the layer's tiles."""
    experts, _, width = layer.w2_weight.shape
    kernel = layer.quant_method.moe_kernel.fused_experts
    return get_config_file_name(experts, width, _type_name(layer), kernel.block_shape)


def tiles_in_use(layer: RoutedExperts, rows: int) -> dict[str, int]:
    """What vLLM takes for a step of so many rows, as things are."""
    shapes = layer.w13_weight.size(), layer.w2_weight.size()
    top_k, kernel = layer.moe_config.experts_per_token, layer.quant_method.moe_kernel.fused_experts
    return dict(
        try_get_optimal_moe_config(*shapes, top_k, _type_name(layer), rows, kernel.block_shape)
    )


def run_with_tiles(layer: RoutedExperts, tiles: Tiles | None, rows: torch.Tensor) -> torch.Tensor:
    """`rows` [T, K] through their experts, evenly; `tiles` None: those in use."""
    config = layer.moe_config
    shape = len(rows), config.experts_per_token
    turns = torch.arange(shape[0] * shape[1], dtype=torch.int32, device=rows.device)
    ids = (turns % config.num_experts).view(shape)
    weights = torch.full(shape, 1 / config.experts_per_token, device=rows.device)
    with contextlib.nullcontext() if tiles is None else override_config(dict(tiles)):
        return layer.quant_method.apply(layer, rows, weights, ids, None, None)


def forget_tiles() -> None:
    """Has vLLM look for its files of tiles again."""
    get_moe_configs.cache_clear()


def _type_name(layer: RoutedExperts) -> str | None:
    kernel = layer.quant_method.moe_kernel.fused_experts
    return kernel.quant_config.config_name(layer.params_dtype)
