"""Finds what runs the experts of steps of canvases fastest: the kernel that vLLM chose, its Triton
kernel with other tiles, or ours. Has layers run ours in place of vLLM's.

A canvas gives each expert more rows than decoding does and fewer than a prompt. The tiles tried are
those that `config/tuned` has for any GPU: each is compiled, so they are few.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from vllm_dllm.compat import experts
from vllm_dllm.compat.experts import ExpertCall
from vllm_dllm.config.tiles import all_shipped_tiles
from vllm_dllm.experts import mixture_triton
from vllm_dllm.experts.definition import Assignment, Experts
from vllm_dllm.experts.quantise_triton import quantise_rows
from vllm_dllm.measured.stopwatch import Stopwatch, fastest

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


Table = dict[str, dict[str, int]]
"""Tiles by rows of a step, as vLLM's files have them."""

IN_USE, OURS = "those in use", "ours"


class FastestExperts(NamedTuple):
    """What runs layers of experts fastest, by vLLM's name of the file of their tiles. Layers and
    numbers of rows that were not timed are left out."""

    tables: dict[str, Table]
    ours: dict[str, Sizes]
    gains: list[str]  # how much is gained, in words for the log


def measure_experts(
    modules: Iterable[Any],  # of the model, on its device; those without experts are ignored
    rows: Sequence[int],  # of steps
    stopwatch: Stopwatch,
) -> FastestExperts:
    """Times one layer of each shape, and returns what is fastest for each number of `rows`. Layers
    of one shape share vLLM's file of tiles, whose name is the key of the results."""
    tables: dict[str, Table] = {}
    ours: dict[str, Sizes] = {}
    gains = []
    layers: dict[str, Any] = {}
    for layer in experts.find_expert_layers(modules):
        layers.setdefault(experts.tiles_file_name(layer), layer)
    for (file, layer), number in product(layers.items(), rows):
        own_tiles = _tiles_by_name(layer, number)
        size = block_size(layer, number)
        candidates = _candidates(layer, number, own_tiles, size)
        times = stopwatch.time_candidates(f"experts, {number:,} rows", candidates)
        if not times:
            continue
        best = fastest(times)
        ours.setdefault(file, {})[str(number)] = size if best == OURS else 0
        if with_tiles := {name: ms for name, ms in times.items() if name in own_tiles}:
            tables.setdefault(file, {})[str(number)] = own_tiles[fastest(with_tiles)]
        if best != IN_USE:
            gains.append(f"experts at {number:,} rows {times[IN_USE] / times[best]:.2f} times")
    return FastestExperts(tables, ours, gains)


def _tiles_by_name(layer: Any, number: int) -> dict[str, dict[str, int]]:
    """Returns the tiles in use and those that we ship, by name. Returns none if the layer's kernel
    takes no tiles. `number`: rows of a step."""
    if not experts.has_tunable_tiles(layer):
        return {}
    in_use = experts.tiles_in_use(layer, number)
    others = [each for each in all_shipped_tiles() if each != in_use]
    return {IN_USE: in_use, **{str(each): each for each in others}}


def _candidates(
    layer: Any, number: int, own_tiles: dict[str, dict[str, int]], size: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns functions that run a layer with `number` rows, by name: the kernel in use with each
    of its tiles, and ours if `size` is not 0."""
    weight = layer.w2_weight
    states = torch.randn(number, layer.hidden_size, device=weight.device).to(layer.params_dtype)
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(run_layer, layer, 0, states, own_tiles.get(name))
        for name in own_tiles or (IN_USE,)
    }
    if size:
        candidates[OURS] = partial(run_layer, layer, size, states)
    return candidates
