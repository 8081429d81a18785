"""Our experts for few rows each, in the place of vLLM's kernel."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from vllm_dllm.compat import experts
from vllm_dllm.compat.experts import Call
from vllm_dllm.experts import few_rows_triton
from vllm_dllm.experts.definition import Assignment, Experts

Sizes = dict[str, int]
"""Of blocks, by rows of a step; 0 is vLLM's kernel."""


def block_size(layer: Any, num_tokens: int) -> int:
    """The size of blocks that would compute a step of so many rows; 0 where none can."""
    num_experts, hidden, width = layer.w2_weight.shape
    if not experts.is_two_products(layer):
        return 0
    if few_rows_triton.unfit(hidden, width, layer.activation.value):
        return 0
    top_k = layer.moe_config.experts_per_token
    return few_rows_triton.block_size(num_tokens, top_k, num_experts) or 0


def run(layer: Any, size: int, states: torch.Tensor) -> torch.Tensor:
    """`states` [T, K] through their experts, evenly, in blocks of `size`."""
    experts.set_expert_kernel(layer, lambda call: _compute(call, size))
    try:
        return experts.run_with_tiles(layer, None, states)
    finally:
        experts.set_expert_kernel(layer, None)


def use(modules: Iterable[Any], sizes: Mapping[str, Sizes]) -> None:
    """Computes steps of layers, by vLLM's name of the file of their tiles, as the nearest size that
    was timed, as vLLM picks tiles. The kernels are compiled here: later, requests would wait."""
    compiled = set()
    for layer in experts.layers(modules):
        file = experts.tiles_file_name(layer)
        if file not in sizes:
            continue
        if file not in compiled:
            weight = layer.w2_weight
            states = torch.zeros(1, weight.shape[1], device=weight.device, dtype=layer.params_dtype)
            for size in set(sizes[file].values()) - {0}:
                run(layer, size, states)
            compiled.add(file)
        experts.set_expert_kernel(layer, partial(_chosen, sizes[file]))


def _chosen(sizes: Sizes, call: Call) -> bool:
    nearest = min(sizes, key=lambda rows: abs(int(rows) - len(call.states)))
    return sizes[nearest] > 0 and _compute(call, sizes[nearest])


def _compute(call: Call, size: int) -> bool:
    few_rows_triton.mix(
        call.states,
        call.state_scale,
        Experts(call.gate_up, call.down, *call.scales),
        call.weights,
        Assignment(*call.align_blocks(size)),
        size,
        call.activation,
        call.inner,
        call.rows,
        call.output,
    )
    return True
