"""Which tiles vLLM's Triton experts run fastest with, for steps of canvases.

A canvas gives each expert more rows than decoding does and fewer than a prompt. Candidates are the
tiles in use and all that `config/tuned` has for any GPU: each is compiled, so they are few.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_dllm.compat import experts
from vllm_dllm.config import tiles
from vllm_dllm.measured.stopwatch import Stopwatch, fastest

Table = dict[str, dict[str, int]]
"""Tiles by rows of a step, as vLLM's files have them."""

IN_USE = "those in use"


def measure(
    modules: Iterable[Any],  # of the model, on its device; those without experts are ignored
    rows: Sequence[int],  # of steps
    stopwatch: Stopwatch,
) -> tuple[dict[str, Table], list[str]]:
    """Returns the tiles for each of `rows` that could be timed, by vLLM's name of the file, and the
    gains in words. Layers of one shape share a file, so that one of them is timed."""
    tables: dict[str, Table] = {}
    gains = []
    for layer in experts.layers_with_tiles(modules):
        file = experts.tiles_file(layer)
        if file in tables:
            continue
        tables[file] = {}
        for number in rows:
            in_use, others = experts.tiles_in_use(layer, number), shipped()
            candidates = {IN_USE: in_use, **{str(each): each for each in others if each != in_use}}
            found = stopwatch.times(f"experts, {number:,} rows", _runs(layer, number, candidates))
            if not found:
                continue
            best = fastest(found)
            tables[file][str(number)] = candidates[best]
            if best != IN_USE:
                gains.append(f"experts at {number:,} rows {found[IN_USE] / found[best]:.2f} times")
    return {file: table for file, table in tables.items() if table}, gains


def _runs(
    layer: Any, number: int, candidates: dict[str, dict[str, int]]
) -> dict[str, Callable[[], torch.Tensor]]:
    weight = layer.w2_weight
    states = torch.randn(number, layer.hidden_size, device=weight.device).to(layer.params_dtype)
    return {
        name: partial(experts.run_with_tiles, layer, each, states)
        for name, each in candidates.items()
    }


def shipped() -> list[dict[str, int]]:
    """All tiles of all files that we ship, each once."""
    found: list[dict[str, int]] = []
    for path in sorted(tiles.FOLDER.glob("*.json")):
        for each in json.loads(path.read_text()).values():
            if isinstance(each, dict) and each not in found:
                found.append(each)
    return found
