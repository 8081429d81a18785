"""How a denoise step's time grows with one thing at a time, and the exponent that fits."""

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import harness
from bench.cpu_sizes_checkpoints import FORMATS, make
from bench.system import Call, taking_turns

PROMPT, STEPS = 63, 5
FORMAT = "bf16"
CANVASES = (32, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (0, 1024, 2048, 4096, 8192, 16_384, 32_768)
VOCABULARIES = (2048, 8192, 32_768, 131_072)
AXES = {"canvas": "60M", "batch": "60M", "context": "4M", "vocabulary": "4M"}
"""What grows -> the shape it grows in."""


def measure(axis: str, rounds: int) -> dict[str, Any]:
    print(f"growth with {axis}, {AXES[axis]}, {FORMAT}", flush=True)
    find = {
        "canvas": _canvas,
        "batch": _batch,
        "context": _context,
        "vocabulary": _vocabulary,
    }[axis]
    points = {str(size): harness.spread(ms) for size, ms in find(rounds).items()}
    for size, point in points.items():
        print(f"  {size}: {point['median']:.4g} ms per step", flush=True)
    medians = {int(size): float(point["median"]) for size, point in points.items()}
    return {"shape": AXES[axis], "format": FORMAT, "points": points, "fit": fit(medians)}


def fit(points: dict[int, float]) -> dict[str, float]:
    """ms = factor * size ** exponent, by least squares of logarithms over the larger half of the
    sizes: below it the step's fixed costs rule."""
    sizes = sorted(size for size in points if size > 0)
    sizes = sizes[-max(3, math.ceil(len(sizes) / 2)) :]
    line = statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(points[size]) for size in sizes]
    )
    return {
        "exponent": line.slope,
        "factor_ms": math.exp(line.intercept),
        "from": sizes[0],
        "to": sizes[-1],
    }


def _canvas(rounds: int) -> dict[int, list[float]]:
    with _engine("canvas", CANVASES[-1], 1) as call:
        return _turns(call, rounds, [(size, 1, PROMPT, size) for size in CANVASES])


def _batch(rounds: int) -> dict[int, list[float]]:
    canvas = 64  # as many rows at 32 as a canvas of 2,048 has
    with _engine("batch", canvas, BATCHES[-1]) as call:
        return _turns(call, rounds, [(size, size, PROMPT, canvas) for size in BATCHES])


def _context(rounds: int) -> dict[int, list[float]]:
    canvas = 64
    with _engine("context", canvas, 1, CONTEXTS[-1] + canvas + 64) as call:
        # A prompt has a token. Long ones take long to prefill, and are asked once.
        short = [(size, 1, max(size, 1), canvas) for size in CONTEXTS if size <= 8192]
        found = _turns(call, rounds, short)
        long = [(size, 1, size, canvas) for size in CONTEXTS if size > 8192]
        return found | _turns(call, 1, long)


def _vocabulary(rounds: int) -> dict[int, list[float]]:
    canvas = 64
    found: dict[int, list[float]] = {}
    for size in VOCABULARIES:
        with _engine("vocabulary", canvas, 1, vocab_size=size) as call:
            found |= _turns(call, rounds, [(size, 1, PROMPT, canvas)])
    return found


def _turns(
    call: Call, rounds: int, cells: Sequence[tuple[int, int, int, int]]
) -> dict[int, list[float]]:
    """Size -> ms of a step, round by round. A cell is its size, the requests at once, their tokens
    of prompt, and their canvas."""
    found: dict[int, list[float]] = {size: [] for size, *_ in cells}
    for turn in range(-1, rounds):  # the first warms up
        for size, count, prompt, canvas in cells:
            if turn < 0 and prompt > 1024:
                continue
            options = dict(count=count, prompt=prompt, canvas=canvas, steps=STEPS, seed=turn)
            ms = call(FORMAT, "steps", **options)["steps_ms"]
            if turn >= 0:
                found[size].append(statistics.median(ms))
    return found


@contextmanager
def _engine(
    axis: str, canvas: int, max_num_seqs: int, max_model_len: int = 1024, **changed: int
) -> Iterator[Call]:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make(Path(folder), AXES[axis], [FORMAT], **changed)[FORMAT]
        settings = {
            "checkpoint": str(checkpoint),
            "canvas_length": canvas,
            "dtype": FORMATS[FORMAT].dtype,
            "eager": True,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
        }
        engine = "bench.cpu_sizes_systems:SizesEngine"
        with taking_turns({FORMAT: (engine, settings)}) as (_, call):
            yield call
