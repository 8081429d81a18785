"""Runs layers of experts with our kernels, in place of vLLM's."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from vllm_dllm.compat import experts
from vllm_dllm.compat.experts import ExpertCall
from vllm_dllm.experts import mixture_triton
from vllm_dllm.experts.definition import Assignment, Experts
from vllm_dllm.experts.quantise_triton import quantise_rows

Sizes = dict[str, int]
"""Sizes of blocks by the rows of a step, which are strings as in JSON; 0 means vLLM's kernel."""
SizesOf = Mapping[str, Sizes]
"""By vLLM's name of the file of a layer's tiles."""


def block_size(layer: Any, num_tokens: int) -> int:
    """Returns the size of blocks for a step of `num_tokens` rows. Returns 0 if our kernel cannot
    run it."""
    num_experts, hidden, width = layer.w2_weight.shape
    if not experts.is_two_products(layer):
        return 0
    if mixture_triton.find_obstacle(hidden, width, layer.activation.value):
        return 0
    top_k = layer.moe_config.experts_per_token
    return mixture_triton.block_size(num_tokens, top_k, num_experts)


def run_layer(
    layer: Any, size: int, states: torch.Tensor, tiles: experts.Tiles | None = None
) -> torch.Tensor:
    """Returns the result of a layer's experts for `states` [T, K] as steps compute it: by our
    kernel in blocks of `size` rows, or, if that is 0, by vLLM's with these tile sizes. `tiles`
    None: those in use. Tokens are spread evenly over the experts. The layer then runs vLLM's kernel
    again."""
    if not block_size(layer, num_tokens=1):
        return experts.run_with_tiles(layer, tiles, states)
    experts.set_expert_kernel(layer, partial(_compute, size), quantise_rows)
    try:
        return experts.run_with_tiles(layer, tiles, states)
    finally:
        experts.reset_expert_kernel(layer)


def install_kernels(modules: Iterable[Any], sizes: SizesOf) -> None:
    """Makes layers run our kernels as `sizes` says, and compiles them now, so that no request waits
    for that. Layers that ours cannot run keep vLLM's. A step runs what was fastest for the nearest
    timed number of rows, as vLLM picks tiles."""
    compiled = set()
    for layer in experts.find_expert_layers(modules):
        file = experts.tiles_file_name(layer)
        if file not in sizes or not block_size(layer, num_tokens=1):
            continue
        if file not in compiled:
            weight = layer.w2_weight
            states = torch.zeros(1, weight.shape[1], device=weight.device, dtype=layer.params_dtype)
            for size in {0, *sizes[file].values()}:
                run_layer(layer, size, states)
            compiled.add(file)
        experts.set_expert_kernel(layer, partial(_compute_by_rows, sizes[file]), quantise_rows)


def _compute_by_rows(sizes: Sizes, call: ExpertCall) -> bool:
    """Computes a call as was fastest for the nearest timed number of rows. Returns False if vLLM
    should compute it."""
    nearest = min(sizes, key=lambda rows: abs(int(rows) - len(call.states)))
    return _compute(sizes[nearest], call)


def _compute(size: int, call: ExpertCall) -> bool:
    """Computes a call in blocks of `size` rows, into its output. Returns False if that is 0, and
    vLLM should compute it."""
    if not size:
        return False
    mixture_triton.mix_experts(
        call.states,
        call.state_scale,
        Experts(call.gate_up, call.down, *call.scales),
        call.weights,
        Assignment(*call.align_blocks(size)),
        size=size,
        activation=call.activation,
        inner=call.inner,
        rows=call.rows,
        output=call.output,
    )
    return True
