"""Finds what runs the experts of steps of canvases fastest: the kernel that vLLM chose, its Triton
kernel with other tiles, or ours.

A canvas gives each expert more rows than decoding does and fewer than a prompt. The tiles tried are
those that `config/tuned` has for any GPU: each is compiled, so they are few.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from vllm_dllm.compat import experts
from vllm_dllm.config import tiles
from vllm_dllm.measured import expert_kernels
from vllm_dllm.measured.expert_kernels import Sizes
from vllm_dllm.measured.stopwatch import Stopwatch, fastest

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
        size = expert_kernels.block_size(layer, number)
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
    others = [each for each in tiles.all_shipped_tiles() if each != in_use]
    return {IN_USE: in_use, **{str(each): each for each in others}}


def _candidates(
    layer: Any, number: int, own_tiles: dict[str, dict[str, int]], size: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns functions that run a layer with `number` rows, by name: the kernel in use with each
    of its tiles, and ours if `size` is not 0."""
    weight = layer.w2_weight
    states = torch.randn(number, layer.hidden_size, device=weight.device).to(layer.params_dtype)
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(expert_kernels.run_layer, layer, 0, states, own_tiles.get(name))
        for name in own_tiles or (IN_USE,)
    }
    if size:
        candidates[OURS] = partial(expert_kernels.run_layer, layer, size, states)
    return candidates
