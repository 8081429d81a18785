"""What runs the experts of steps of canvases fastest: the kernel that vLLM chose, its Triton kernel
with other tiles, or ours for few rows an expert.

A canvas gives each expert more rows than decoding does and fewer than a prompt. Tiles that are
tried are those that `config/tuned` has for any GPU: each is compiled, so they are few.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_dllm.compat import experts
from vllm_dllm.config import tiles
from vllm_dllm.measured import few_rows
from vllm_dllm.measured.few_rows import Sizes
from vllm_dllm.measured.stopwatch import Stopwatch, fastest

Table = dict[str, dict[str, int]]
"""Tiles by rows of a step, as vLLM's files have them."""

IN_USE, OURS = "those in use", "ours"


def measure_experts(
    modules: Iterable[Any],  # of the model, on its device; those without experts are ignored
    rows: Sequence[int],  # of steps
    stopwatch: Stopwatch,
) -> tuple[dict[str, Table], dict[str, Sizes], list[str]]:
    """Returns the tiles for each of `rows` that could be timed, by vLLM's name of the file; which
    of them our kernel is faster for, by the same names; and the gains in words. Layers of one shape
    share a file, so that one of them is timed."""
    tables: dict[str, Table] = {}
    ours: dict[str, Sizes] = {}
    gains = []
    for layer in experts.layers(modules):
        file = experts.tiles_file_name(layer)
        if file in tables:
            continue
        tables[file], ours[file] = {}, {}
        for number in rows:
            own_tiles, size = _tiles(layer, number), few_rows.block_size(layer, number)
            candidates = _candidates(layer, number, own_tiles, size)
            found = stopwatch.times(f"experts, {number:,} rows", candidates)
            if not found:
                continue
            best = fastest(found)
            ours[file][str(number)] = size if best == OURS else 0
            if with_tiles := {name: ms for name, ms in found.items() if name in own_tiles}:
                tables[file][str(number)] = own_tiles[fastest(with_tiles)]
            if best != IN_USE:
                gains.append(f"experts at {number:,} rows {found[IN_USE] / found[best]:.2f} times")
    ours = {file: sizes for file, sizes in ours.items() if any(sizes.values())}
    return {file: table for file, table in tables.items() if table}, ours, gains


def _tiles(layer: Any, number: int) -> dict[str, dict[str, int]]:
    """Returns those in use and others, by name; none where a layer's kernel has no choice."""
    if not experts.has_tunable_tiles(layer):
        return {}
    in_use = experts.tiles_in_use(layer, number)
    return {IN_USE: in_use, **{str(each): each for each in shipped() if each != in_use}}


def _candidates(
    layer: Any, number: int, own_tiles: dict[str, dict[str, int]], size: int
) -> dict[str, Callable[[], torch.Tensor]]:
    weight = layer.w2_weight
    states = torch.randn(number, layer.hidden_size, device=weight.device).to(layer.params_dtype)
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(experts.run_with_tiles, layer, own_tiles.get(name), states)
        for name in own_tiles or (IN_USE,)
    }
    if size:
        candidates[OURS] = partial(few_rows.run, layer, size, states)
    return candidates


def shipped() -> list[dict[str, int]]:
    """All tiles of all files that we ship, each once."""
    found: list[dict[str, int]] = []
    for path in sorted(tiles.FOLDER.glob("*.json")):
        for each in json.loads(path.read_text()).values():
            if isinstance(each, dict) and each not in found:
                found.append(each)
    return found
