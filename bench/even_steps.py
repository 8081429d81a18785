"""Steps that an H200 took with even routing, and what they should take with the kernels of today.

    python -m bench.even_steps

Measured: `results/h200/steps_even.json`, ours at 001486d and stock vLLM's, FP8. Since then, other
kernels run the experts and attention of one canvas. Predicted: a measured step, less what those
parts took in its timeline (`timeline_even.json`), plus what their kernels take alone
(`experts.json`, `attention_few.json`). No whole step has been measured with them.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.dummy_checkpoint import CANVAS, SHAPE_26B
from bench.full_shape import LONGEST_CONTEXT, Cell, bar
from bench.full_shape_engine import OURS, STOCK
from bench.roofline import FULL_LAYERS, LAYERS, between, results

SCHEME = "fp8-dynamic"
TRACED = (1, 16)  # canvases
OUR_EXPERTS = 256  # tokens up to which ours run them


class Step(NamedTuple):
    """ms. `stock`: None where it was not run."""

    cell: str
    ours: float  # at 001486d
    stock: float | None
    today: float  # predicted, ours
    bar: float | None  # share of stock's step

    @property
    def shares(self) -> tuple[float, float] | None:
        """Of stock's step: what was measured, and what is predicted."""
        return None if self.stock is None else (self.ours / self.stock, self.today / self.stock)


def steps() -> Iterator[Step]:
    """Yields each measured step, in the order of the file."""
    measured = results("steps_even.json")["results"]
    for name in measured[OURS]["cells"]:
        cell = Cell.read(name)
        ours, stock = (step_ms(measured, system, name) for system in (OURS, STOCK))
        assert ours is not None
        today = ours - experts_path(cell.concurrency) + experts_today(cell.concurrency)
        if cell.concurrency == 1:
            today -= (LAYERS - FULL_LAYERS) * attention_gain(cell.context)
        yield Step(name, ours, stock, today, bar(SCHEME, cell))


def step_ms(measured: dict[str, Any], system: str, name: str) -> float | None:
    """At the longest context how long the GPU was busy: `bench.full_shape` left no room behind the
    last canvas, so both engines waited for their hosts in every step."""
    if name not in measured[system]["cells"]:
        return None
    if Cell.read(name).context == LONGEST_CONTEXT:
        trace = timeline("ours" if system == OURS else "stock", name)
        return float(trace["span_ms"] - trace["idle_ms"])
    return float(measured[system]["cells"][name]["ms_per_step"]["median"])


def timeline(system: str, name: str) -> Any:
    return results("timeline_even.json")["traces"][f"{system}-fp8-{name}"]


def experts_path(canvases: int) -> float:
    """ms of a step that CUTLASS and what is around it took."""
    known = [timeline("ours", f"{n}x128")["experts_path"]["ms"] for n in TRACED]
    return between(list(TRACED), known, canvases)


def experts_today(canvases: int) -> float:
    """ms of a step: our kernel for one canvas, else vLLM's Triton kernel with the best tiles, which
    the shipped ones are within 0.4% of."""
    layer = results("experts.json")["layers"][str(canvases * CANVAS)]
    kernel = "ours FP8" if canvases * CANVAS <= OUR_EXPERTS else "Triton FP8, best tiles"
    return LAYERS * float(layer[kernel])


def attention_gain(context: int) -> float:
    """ms of a sliding layer with one canvas: Triton's time less FlashAttention-4's."""
    cells = {
        cell["context"]: cell["ms"]
        for cell in results("attention_few.json")["cells"]
        if cell["layer"] == "sliding" and cell["batch"] == 1
    }
    contexts = sorted(cells)
    gains = [cells[c]["ours"]["median"] - cells[c]["ours, FA4"]["median"] for c in contexts]
    return between(contexts, gains, min(context, SHAPE_26B["sliding_window"]))


def lines() -> Iterator[str]:
    """A table; in brackets the share of stock's step."""
    yield "| requests x context | stock | ours, 001486d | ours today, predicted | goal |"
    yield "|---|---|---|---|---|"
    for step in steps():
        was, today = (
            ("", "") if step.shares is None else (f" ({share:.2f})" for share in step.shares)
        )
        stock = "not run" if step.stock is None else f"{step.stock:.1f}"
        goal = "" if step.bar is None else f"{step.bar:g}"
        yield f"| {step.cell} | {stock} | {step.ours:.1f}{was} | {step.today:.1f}{today} | {goal} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("FP8, even routing, ms a step:", *lines(), sep="\n")
    print(json.dumps([step._asdict() for step in steps()]))


if __name__ == "__main__":
    main()
