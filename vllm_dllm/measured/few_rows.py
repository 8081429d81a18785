"""Runs layers of experts with our kernels, in place of vLLM's: all of it in steps of few rows, and
what is before and between the products in FP8."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from vllm_dllm.compat import experts
from vllm_dllm.compat.experts import ExpertCall
from vllm_dllm.experts import few_rows_triton
from vllm_dllm.experts.activation_triton import activate_and_quantise, quantise_rows
from vllm_dllm.experts.definition import FP8, Assignment, Experts

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
    if few_rows_triton.find_obstacle(hidden, width, layer.activation.value):
        return 0
    top_k = layer.moe_config.experts_per_token
    return few_rows_triton.block_size(num_tokens, top_k, num_experts) or 0


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
    """Computes a call with our kernel, in blocks of `size` rows. If that is 0: in FP8 with vLLM's
    Triton kernel and our activation; else returns False, and vLLM should compute it."""
    if size > 0:
        return _mix_experts(call, size)
    return call.products is not None and _mix_by_triton(call, call.products)


def _mix_by_triton(call: ExpertCall, products: torch.Tensor) -> bool:
    """Computes a call in FP8 with vLLM's Triton kernel, and activates and quantises in one launch
    in between. Returns True."""
    assert call.state_scale is not None
    tiles = call.tiles()
    assignment = call.align_blocks(tiles["BLOCK_SIZE_M"])
    call.multiply(call.states, call.state_scale, 0, assignment, tiles, products)
    quantised = call.inner.view(FP8).flatten()[: call.inner.numel()].view(call.inner.shape)
    scale = torch.empty(len(products), 1, dtype=torch.float32, device=products.device)
    activate_and_quantise(products, quantised, scale, call.activation)
    call.multiply(quantised, scale, 1, assignment, tiles, call.rows)
    call.sum_rows()
    return True


def _mix_experts(call: ExpertCall, size: int) -> bool:
    """Computes a call with our kernel, in blocks of `size` rows, into the call's output. Returns
    True."""
    few_rows_triton.mix_experts(
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
