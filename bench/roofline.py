"""Predicts how long a denoise step of the 26B model takes on GPUs that nobody here has.

    python -m bench.roofline                  # table, calibration; the last line is JSON
    python -m bench.roofline --chip B200

A part of a step takes as long as its bytes or its multiplications, whichever is longer. Those of
our attention and of stock vLLM's in Triton are counted in the machine code
(`attention_kernels/CODEGEN.md`). All others are counted by shapes, and so is FlashAttention-4,
which stock vLLM prefers on these chips and whose code Triton cannot show. Nothing here is measured:
all times are predictions, and the constants below are assumptions. The model is held against two
published numbers of stock vLLM, and says by how much it misses them. These do not say how many
forwards a canvas took, so they test the ratio of two chips: times as such may all be too short or
too long by the same factor.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from attention_kernels import triton_fwd
from bench.codegen import table
from bench.codegen.case import Case
from bench.codegen.kernels import cases
from bench.dummy_checkpoint import CANVAS, SHAPE_26B
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.step.logits import tile_shape

LAYERS, HIDDEN = SHAPE_26B["num_hidden_layers"], SHAPE_26B["hidden_size"]
VOCABULARY, EXPERTS = SHAPE_26B["vocab_size"], SHAPE_26B["num_experts"]
FULL_EVERY = 6  # of Gemma 4's layers, one in so many has full attention
SAMPLING_BYTES = ExtensionConfig().sampling_memory_mib << 20
TRITON = "3.7.1"  # what `.[cuda]` installs

BANDWIDTH_REACHED, FLOPS_REACHED = 0.85, 0.6  # of a chip's best, by good kernels
GAP_S = 1.5e-6  # of a small kernel in a CUDA graph
LAUNCH_S = 2.5e-6  # of one outside, while the host is ahead: it waits for nothing
KERNELS_A_LAYER = 22  # in the graph: norms, projections, router, experts, attention, cache
# Outside of the graph. Ours: of a step, of each tile of the vocabulary, and to gather what several
# requests have in slots apart, as counted by tests/gpu_dry_run/test_launches.py. Stock's are a
# guess: PyTorch compiles its sampler for the GPU.
OUR_LAUNCHES, OUR_LAUNCHES_A_TILE, OUR_GATHERS = 21, 5, 8
STOCK_LAUNCHES = 60
# Times that a logit is read or written between the LM head and the product with the embeddings.
BYTES_A_LOGIT = {
    "ours": 2 + 4 + 4 + 2,  # LM head; read_blocks, weigh: in place; product. All bf16
    "stock": 2 + 2 + 8 + 8 + 4 + 4 + 2 + 2,  # LM head; soft cap in fp32; row_stats twice; product
}


@dataclass(frozen=True)
class Chip:
    capability: int
    processors: int
    clock: float  # Hz
    flops_a_cycle: int  # of a processor, bf16, dense
    bandwidth: float  # bytes a second

    @property
    def flops(self) -> float:
        return self.processors * self.clock * self.flops_a_cycle


CHIPS = {  # data sheets
    "H100": Chip(90, 132, 1.83e9, 4096, 3.35e12),
    "H200": Chip(90, 132, 1.83e9, 4096, 4.8e12),
    "B200": Chip(100, 148, 1.85e9, 8192, 8.0e12),
}


class Scheme(NamedTuple):
    """Bytes of a weight, and how much faster than bf16 it is multiplied."""

    attention: float
    experts: float
    attention_speedup: float = 1.0
    experts_speedup: tuple[float, float] = (1.0, 1.0)  # on Hopper, on Blackwell

    def speedup(self, chip: Chip) -> float:
        return self.experts_speedup[chip.capability >= 100]


SCHEMES = {
    "bf16": Scheme(2, 2),
    "fp8-dynamic": Scheme(1, 1, 2.0, (2.0, 2.0)),
    "nvfp4": Scheme(2, 0.5625, 1.0, (1.0, 4.0)),  # its attention is bf16; Hopper unpacks weights
}
SYSTEMS = ("ours", "stock-triton", "stock")
READ = {"ours": "attention", "stock-triton": "stock vLLM's attention"}  # and their kernels
TCGEN05_ROWS = 128  # fewer take as long
GOALS = {1: 1.25, 32: 1.5}  # canvases: times as fast as stock
GOAL_OVER_FLOOR = 1.25
PUBLISHED = {"H100": 1008, "H200": 1288}  # tokens a second: vLLM, FP8, one request


class Part(NamedTuple):
    name: str
    num_bytes: float
    flops: float
    seconds: float = 0.0  # known otherwise: a lower bound


def parts(chip: Chip, scheme: Scheme, batch: int, context: int, system: str) -> Iterator[Part]:
    """Of a step of `batch` canvases, each behind `context` tokens."""
    rows = batch * CANVAS
    projections = sum(_projections(full) for full in _layers())
    yield Part(
        "projections",
        scheme.attention * projections,
        2 * rows * projections / scheme.attention_speedup,
    )
    dense = 3 * LAYERS * HIDDEN * SHAPE_26B["intermediate_size"]
    expert = 3 * LAYERS * HIDDEN * SHAPE_26B["moe_intermediate_size"]
    used = SHAPE_26B["top_k_experts"]
    read = EXPERTS * (1 - (1 - used / EXPERTS) ** rows)
    yield Part(
        "experts",
        scheme.experts * (dense + read * expert),
        2 * rows * (dense + used * expert) / scheme.speedup(chip),
    )
    for full in (False, True):
        yield _attention(chip, full, batch, context, system)
    head = VOCABULARY * HIDDEN
    yield Part("LM head", 2 * head, 2 * rows * head)
    yield Part("soft embedding", 2 * head, 2 * rows * head)
    yield Part("passes over logits", BYTES_A_LOGIT[system.partition("-")[0]] * rows * VOCABULARY, 0)
    yield Part("self-conditioning", 2 * dense / LAYERS, 2 * rows * dense / LAYERS)
    graph = GAP_S * KERNELS_A_LAYER * LAYERS
    yield Part("launches", 0, 0, graph + LAUNCH_S * launches(rows, system))


def launches(rows: int, system: str) -> int:
    """Outside of the CUDA graph."""
    if system != "ours":
        return STOCK_LAUNCHES
    tile_rows, tile_tokens = tile_shape(rows, SAMPLING_BYTES, fused_bytes=4)
    tiles = math.ceil(rows / tile_rows) * math.ceil(VOCABULARY / tile_tokens)
    gathers = OUR_GATHERS if rows > CANVAS else 0
    return OUR_LAUNCHES + gathers + OUR_LAUNCHES_A_TILE * tiles


def step_s(chip: Chip, scheme: Scheme, batch: int, context: int, system: str) -> float:
    return sum(_seconds(chip, part) for part in parts(chip, scheme, batch, context, system))


def attention_s(chip: Chip, batch: int, context: int, system: str) -> float:
    return sum(
        _seconds(chip, _attention(chip, full, batch, context, system)) for full in (False, True)
    )


def floor_s(chip: Chip, scheme: Scheme, batch: int, context: int) -> float:
    """No step is faster: what must be read is read once, at full bandwidth, and multiplied at
    full speed."""
    needed = [
        part
        for part in parts(chip, scheme, batch, context, "stock")
        if part.name not in ("passes over logits", "launches")
    ]
    num_bytes, flops = sum(p.num_bytes for p in needed), sum(p.flops for p in needed)
    return max(num_bytes / chip.bandwidth, flops / chip.flops)


class Calibration(NamedTuple):
    forwards: float  # of a canvas of the published runs, which do not say: fitted
    predicted: dict[str, float]  # tokens a second
    errors: dict[str, float]  # by which the prediction is off, a share


def calibrate() -> Calibration:
    """One unknown for two numbers, so that the model can be wrong."""
    seconds = {
        name: step_s(CHIPS[name], SCHEMES["fp8-dynamic"], 1, 512, "stock") for name in PUBLISHED
    }
    each = [CANVAS / PUBLISHED[name] / seconds[name] for name in PUBLISHED]
    forwards = math.prod(each) ** (1 / len(each))
    predicted = {name: CANVAS / forwards / seconds[name] for name in PUBLISHED}
    errors = {name: predicted[name] / PUBLISHED[name] - 1 for name in PUBLISHED}
    return Calibration(forwards, predicted, errors)


def _seconds(chip: Chip, part: Part) -> float:
    by_bytes = part.num_bytes / (BANDWIDTH_REACHED * chip.bandwidth)
    return max(by_bytes, part.flops / (FLOPS_REACHED * chip.flops), part.seconds)


def _layers() -> list[bool]:
    """Whether each has full attention."""
    return [i % FULL_EVERY == FULL_EVERY - 1 for i in range(LAYERS)]


def _shape(full: bool) -> tuple[int, int]:
    """Head size and key heads."""
    if full:
        return SHAPE_26B["global_head_dim"], SHAPE_26B["num_global_key_value_heads"]
    return SHAPE_26B["head_dim"], SHAPE_26B["num_key_value_heads"]


def _projections(full: bool) -> int:
    """Weights of a layer. In layers with full attention keys serve as values."""
    size, kv_heads = _shape(full)
    return HIDDEN * size * (2 * SHAPE_26B["num_attention_heads"] + (1 if full else 2) * kv_heads)


def _attention(chip: Chip, full: bool, batch: int, context: int, system: str) -> Part:
    """Of all layers of a kind. By shapes alone for "stock", which favours it."""
    name = "full layer" if full else "sliding layer"
    num_layers = sum(each == full for each in _layers())
    size, kv_heads = _shape(full)
    keys = CANVAS + (context if full else min(context, SHAPE_26B["sliding_window"] - 1))
    num_bytes = num_layers * batch * keys * kv_heads * size * 2 * 2
    heads = SHAPE_26B["num_attention_heads"]
    flops = num_layers * batch * CANVAS * heads * keys * size * 2 * 2
    seconds = 0.0
    if system in READ:
        kernel = f"{READ[system]}, {name}, bf16"
        seconds = num_layers * _kernel_s(chip, kernel, batch, keys, kv_heads)
    return Part(f"attention, {name}s", num_bytes, flops, seconds)


def _kernel_s(chip: Chip, name: str, batch: int, keys: int, kv_heads: int) -> float:
    """Of one launch: instructions issued or products, in as many turns as programs need, one of
    which fills a processor."""
    case = cases(chip.capability)[name]
    (facts,) = (row.facts for row in table.read() if row.key == (name, chip.capability, TRITON))
    queries, heads = _constant(case, "BLOCK_Q"), _constant(case, "HEADS", "num_queries_per_kv")
    keys_a_pass = _constant(case, "BLOCK_N", "TILE_SIZE")
    programs = batch * -(-CANVAS // queries) * kv_heads * _constant(case, "PARTS")
    splits = triton_fwd._choose_splits(programs, keys, chip.processors) if case.is_ours else 1
    turns = -(-programs * splits // chip.processors)
    passes = -(-keys // (keys_a_pass * splits))
    issue = facts.instructions * case.options["num_warps"] / 4  # four schedulers
    multiply = case.loop_flops * (facts.times_needed or 1) / chip.flops_a_cycle
    if facts.units == "tcgen05":
        multiply *= max(1.0, TCGEN05_ROWS / (queries * heads))
    return turns * passes * max(issue, multiply) / chip.clock


def _constant(case: Case, *names: str) -> int:
    """Of these constants, as we and as vLLM name them, the one that it has; 1 if it has none."""
    return next((int(str(case.constants[name])) for name in names if name in case.constants), 1)


class Prediction(NamedTuple):
    scheme: str
    batch: int
    context: int
    ours_ms: float
    stock_ms: float
    floor_ms: float

    @property
    def missed(self) -> list[str]:
        """The goals that it misses."""
        over_stock, over_floor = self.stock_ms / self.ours_ms, self.ours_ms / self.floor_ms
        wanted = GOALS.get(self.batch, 0.0)
        missed = [f"{wanted}x stock"] if over_stock < wanted else []
        return missed + ([f"{GOAL_OVER_FLOOR}x floor"] if over_floor > GOAL_OVER_FLOOR else [])


def predict(chip: Chip) -> Iterator[Prediction]:
    for name, scheme in SCHEMES.items():
        for batch in (1, 8, 32, 64):
            for context in (0, 1024, 8192, 65_536):
                each = (chip, scheme, batch, context)
                ours, stock = (1e3 * step_s(*each, system) for system in ("ours", "stock"))
                yield Prediction(name, batch, context, ours, stock, 1e3 * floor_s(*each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="H100")
    args = parser.parse_args()
    chip, found = CHIPS[args.chip], calibrate()
    print(f"Predictions for one {args.chip}, ms a denoise step of {CANVAS} tokens a canvas")
    print("| scheme | canvases | context | ours | stock | floor | stock / ours | ours / floor |")
    print("|---|---|---|---|---|---|---|---|")
    predictions = list(predict(chip))
    for p in predictions:
        numbers = f"{p.ours_ms:.1f} | {p.stock_ms:.1f} | {p.floor_ms:.1f}"
        ratios = f"{p.stock_ms / p.ours_ms:.2f} | {p.ours_ms / p.floor_ms:.2f}"
        print(f"| {p.scheme} | {p.batch} | {p.context} | {numbers} | {ratios} |")
    missed = Counter(goal for p in predictions for goal in p.missed)
    print(f"\nGoals missed, of {len(predictions)} predictions: {dict(missed) or 'none'}")
    print(f"Calibration: {found.forwards:.1f} forwards a canvas fit the published numbers best.")
    for name, number in PUBLISHED.items():
        predicted = f"{found.predicted[name]:.0f} ({found.errors[name]:+.1%})"
        print(f"{name}: published {number} tokens/s, predicted {predicted}")
    print("\nOne canvas, context 1,024, fp8-dynamic, ms: ours, stock")
    both = (parts(chip, SCHEMES["fp8-dynamic"], 1, 1024, system) for system in ("ours", "stock"))
    for ours_part, stock_part in zip(*both, strict=True):
        times = (1e3 * _seconds(chip, part) for part in (ours_part, stock_part))
        print(f"  {ours_part.name:28}" + "".join(f"{time:8.2f}" for time in times))
    print("\nAttention of all layers, bf16 cache, ms a step: " + ", ".join(SYSTEMS))
    for batch, context in ((1, 1024), (1, 65_536), (32, 1024), (32, 8192)):
        times = (1e3 * attention_s(chip, batch, context, system) for system in SYSTEMS)
        print(
            f"  {f'{batch} canvases, context {context}':28}" + "".join(f"{t:8.2f}" for t in times)
        )
    result = {"predictions": predictions, "calibration": found._asdict()}
    print(json.dumps({"chip": args.chip, **result}))


if __name__ == "__main__":
    main()
