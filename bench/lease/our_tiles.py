"""Tiles of our kernel for few rows an expert, in a layer of the 26B model under even routing.

    python -m bench.lease.our_tiles

One product's tile changes at a time; the time is of the whole layer, without quantising the states.
Ten processes compile, then one times. A line of JSON for each tile that runs, the fastest of each
type and size last. On a CPU, two tiles in a small shape, in Triton's interpreter.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.errors import TritonError

from attention_kernels.interpreter import interpret_kernels
from bench import harness
from bench.lease.experts import ACTIVATION, draw
from bench.lease.timing import error, timed_ms
from vllm_dllm.experts import definition, few_rows_triton
from vllm_dllm.experts.definition import FP8, Assignment, Experts
from vllm_dllm.experts.few_rows_triton import Tile, Tiles

Shape = tuple[int, int, int, int]  # experts, their width, hidden channels, experts of a token
SHAPE, SMALL_SHAPE = (128, 704, 2816, 8), (16, 64, 128, 4)
FEWEST = SHAPE[-1]  # experts that a token needs
COMPILERS = 10
MOST_OFF = {True: 0.1, False: 0.01}  # share of the size of what fp32 gives, in FP8 and without


class Variant(NamedTuple):
    """Tiles of one type of weights, for steps of so many tokens, and blocks of so many rows."""

    is_fp8: bool
    tokens: int
    size: int
    tiles: Tiles


def variants() -> Iterator[Variant]:
    every, few = ((128, 256), (2, 3, 4, 5, 6)), ((128,), (2, 3, 4))  # bytes of depth, stages
    for is_fp8, tokens, size, (depths, stages) in (
        (True, 256, 32, every),
        (True, 256, 16, few),
        (True, 2048, 128, few),
        (False, 256, 32, few),
    ):
        chosen = few_rows_triton.choose_tiles(size)
        found = set[Tiles]()
        for depth, stage, warps in itertools.product(depths, stages, (4, 8)):
            for channels in (32, 64):
                found.add(Tiles(Tile(channels, depth, stage, warps), chosen.down))
            for channels in (64, 128):
                found.add(Tiles(chosen.gate_up, Tile(channels, depth, stage, warps)))
        for tiles in sorted(found):
            yield Variant(is_fp8, tokens, size, tiles)


class Layer:
    """What a layer of experts reads and writes, in one type of weights."""

    def __init__(self, is_fp8: bool, tokens: int, shape: Shape, device: str) -> None:
        self.problem = draw(tokens, shape, device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.states = self.problem.states.to(dtype)
        weights = [
            each.to(FP8 if is_fp8 else dtype) for each in (self.problem.gate_up, self.problem.down)
        ]
        scales = [torch.ones(each.shape[:2], device=device) if is_fp8 else None for each in weights]
        self.experts = Experts(*weights, *scales)
        self.given: torch.Tensor = self.states
        self.scale: torch.Tensor | None = None
        if is_fp8:
            self.given, self.scale = definition.quantise(self.states)
        hidden, width = self.problem.down.shape[1:]
        rows = self.problem.ids.numel()
        self.inner, self.rows = (self.states.new_empty(rows, n) for n in (width, hidden))
        self.output = torch.empty_like(self.states)
        self.assignments: dict[int, Assignment] = {}

    def run(self, size: int, tiles: Tiles) -> torch.Tensor:
        if size not in self.assignments:
            num_experts = len(self.problem.gate_up)
            found = definition.sort_by_expert(self.problem.ids, size, num_experts)
            self.assignments[size] = Assignment(*(each.contiguous() for each in found))
        few_rows_triton.mix_experts(
            self.given, self.scale, self.experts, self.problem.weights, self.assignments[size],
            size, ACTIVATION, self.inner, self.rows, self.output, tiles,
        )  # fmt: skip
        return self.output


def compile_variant(variant: Variant) -> str | None:
    """In a process of its own: leaves the machine code in Triton's cache. Returns why it cannot."""
    try:
        layer = Layer(variant.is_fp8, 1, (FEWEST, *SHAPE[1:]), "cuda")  # the code is the same
        layer.run(variant.size, variant.tiles)
    except (TritonError, RuntimeError) as failure:  # too much shared memory, a pass that failed
        return repr(failure)[:200]
    return None


def time_variant(variant: Variant, layer: Layer, device: str) -> dict[str, Any]:
    """Raises Refused if the result is wrong."""
    found: dict[str, Any] = {
        "our tiles": {"gate_up": variant.tiles.gate_up, "down": variant.tiles.down},
        "fp8": variant.is_fp8,
        "tokens": variant.tokens,
        "size": variant.size,
    }
    layer.output.fill_(float("nan"))
    found["ms"] = timed_ms(partial(layer.run, variant.size, variant.tiles), device)
    expected = layer.problem.expected(min(4, variant.tokens))
    found["error"] = off = error(layer.output[: len(expected)], expected)
    if not off <= MOST_OFF[variant.is_fp8]:  # a NaN is also wrong
        raise harness.Refused(f"{variant} is wrong: off by {off:.4f}.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    if not torch.cuda.is_available():
        interpret_kernels(few_rows_triton)
        layer = Layer(True, 8, SMALL_SHAPE, "cpu")
        for channels in (32, 64):
            tiles = few_rows_triton.choose_tiles(16)
            tiles = tiles._replace(gate_up=tiles.gate_up._replace(channels=channels))
            print(json.dumps(time_variant(Variant(True, 8, 16, tiles), layer, "cpu")), flush=True)
        return
    wanted = list(variants())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, mp_context=context) as pool:
        failures = list(pool.map(compile_variant, wanted))
    compiled = []
    for variant, failure in zip(wanted, failures, strict=True):
        if failure is None:
            compiled.append(variant)
        else:
            print(f"left out: {variant}: {failure}", flush=True)
    if not compiled:
        raise harness.Refused("no tile was compiled.")
    for is_fp8, tokens in sorted({(each.is_fp8, each.tokens) for each in compiled}):
        layer = Layer(is_fp8, tokens, SHAPE, "cuda")
        same = [each for each in compiled if (each.is_fp8, each.tokens) == (is_fp8, tokens)]
        times = [time_variant(variant, layer, "cuda") for variant in same]
        for found in sorted(times, key=lambda each: -each["ms"]):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
