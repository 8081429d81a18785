"""Predicts a denoise step of the 26B model on an H200, from what was measured on one.

    python -m bench.roofline

The parts of a step come from kernel timelines of 1 and of 16 requests, in
`results/h200/timeline.json`: each takes a fixed time and one for every canvas. Experts take the
time of their bytes, or of their products. Attention comes from kernels that were timed alone
(`attention.json`). The model is first held against every step of that day (`steps.json`), most of
which it has not seen. Then it says what a step takes with even routing: as the code was, with
attention and launches mended, and with experts as fast as a good kernel reads; beside it stands
what was measured a day later (`steps_even.json`), with other kernels. The last line is JSON.
"""

import argparse
import json
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from bench.dummy_checkpoint import CANVAS, SHAPE_26B
from bench.full_shape import LONGEST_CONTEXT, Cell, bar
from bench.full_shape_engine import OURS, STOCK
from bench.harness import ROOT

RESULTS = ROOT / "bench" / "results" / "h200"
LAYERS, FULL_LAYERS = SHAPE_26B["num_hidden_layers"], 5
HIDDEN, VOCABULARY = SHAPE_26B["hidden_size"], SHAPE_26B["vocab_size"]
EXPERT = 3 * HIDDEN * SHAPE_26B["moe_intermediate_size"]  # weights
COPY = 4.2e12  # bytes a second, read and written, measured
PEAK = {"bf16": 989e12, "fp8-dynamic": 1979e12}  # FLOP/s, data sheet
BYTES = {"bf16": 2, "fp8-dynamic": 1}  # of a weight of the experts

MADE_UP = 0.5
"""Share of the experts that a step of made-up weights read: bf16's products took 208 us a layer,
and 440 with even routing."""
MADE_UP_LATER = 0.27
"""In stock's bf16 engine, in the second canvas. Fitted to that cell, which thus tests nothing."""
EAGER_MS = 52.3
"""Of the host, for a step of stock vLLM's without a CUDA graph. It is what its cell of 8 took."""
STOCK_S_GRAPHS = 512  # tokens
READ = 0.85  # of COPY, by a good kernel for few rows an expert
MULTIPLIED = 0.5  # of PEAK, by a good kernel for many; CUTLASS reached 0.35
GLUE = 0.5  # of the time around the products that fusing leaves
DENSE_LAUNCH_MS = 0.0047  # of a small dense product: bf16's; in FP8 0.0069
JOIN_MS = 0.0029  # less of a sliding layer's 0.0234 at 384 keys, where splits join in the kernel
LAUNCHES_MS = 0.03  # outside of graphs: the runner's 15 took 0.023, and the step has 5 more
PRODUCTS, AROUND, DENSE = "experts: products", "experts: around", "dense products"
QUANTISING, SMALL, ATTENTION = "quantising activations", "torch small operations", "attention"
SYSTEMS = ("stock", "ours", "mended", "tuned")
"""Stock vLLM; ours at c611b1d; with fused steps, captured around the forward, and the fastest
attention; and with experts, dense products and what is around them as fast as READ, MULTIPLIED and
GLUE say."""


@cache
def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


@dataclass(frozen=True)
class Part:
    """Of a step of n canvases: `fixed` + n * `each`, in ms."""

    fixed: float
    each: float

    def ms(self, canvases: int) -> float:
        return self.fixed + canvases * self.each


def parts(system: str, scheme: str) -> dict[str, Part]:
    """As measured. Bf16 was measured with one request alone: its parts are one canvas'."""
    traces = results("timeline.json")["traces"]
    one = traces[f"{system}-{scheme.partition('-')[0]}-1x128"]["by_kind"]
    if scheme == "bf16":
        return {kind: Part(each["ms"], 0.0) for kind, each in one.items()}
    many, canvases = traces[f"{system}-fp8-16x128"]["by_kind"], 16
    found = {}
    for kind, each in one.items():
        slope = (many[kind]["ms"] - each["ms"]) / (canvases - 1)
        found[kind] = Part(each["ms"] - slope, slope)
    return found


def step(system: str, scheme: str, cell: Cell, read: float = 1.0) -> dict[str, float]:
    """ms by kind of work, where a share `read` of the experts is read."""
    is_stock = system == "stock"
    found = parts("stock" if is_stock else "ours", scheme)
    n = cell.concurrency
    ms = {kind: part.ms(n) for kind, part in found.items()}
    weights = LAYERS * SHAPE_26B["num_experts"] * EXPERT * BYTES[scheme]  # bytes
    flops = 2 * n * CANVAS * LAYERS * SHAPE_26B["top_k_experts"] * EXPERT
    by_bytes = found[PRODUCTS].ms(1) * read / MADE_UP
    by_products = n * CANVAS * product_ms() if scheme != "bf16" else 0.0
    if system == "tuned":
        by_bytes = min(by_bytes, 1000 * read * weights / (READ * COPY))
        by_products = 1000 * flops / (MULTIPLIED * PEAK[scheme])
        for kind in (AROUND, QUANTISING):
            ms[kind] = GLUE * ms.get(kind, 0.0)
        if scheme != "bf16":
            number = results("timeline.json")["traces"]["ours-fp8-1x128"]["by_kind"][DENSE]
            saved = found[DENSE].fixed - DENSE_LAUNCH_MS * number["kernels"]
            ms[DENSE] -= max(0.0, saved)
    ms[PRODUCTS] = max(by_bytes, by_products)
    ms[ATTENTION] = attention(system, cell)
    if system in ("mended", "tuned"):
        stock_s, outside = parts("stock", scheme)[SMALL], parts("stock", "bf16")[SMALL].ms(1)
        in_graph = max(0.0, 1 - outside / stock_s.ms(1))
        ms[SMALL] = in_graph * stock_s.ms(n) + LAUNCHES_MS
    if is_stock and n * CANVAS > STOCK_S_GRAPHS:
        ms["waiting for the host"] = max(0.0, EAGER_MS - sum(ms.values()))
    return ms


def product_ms() -> float:
    """Of a token in FP8's experts, in a step of 16 canvases: there products take longer than
    bytes."""
    many = results("timeline.json")["traces"]["ours-fp8-16x128"]["by_kind"][PRODUCTS]
    return many["ms"] / (16 * CANVAS)


def attention(system: str, cell: Cell) -> float:
    """ms of all layers. A step's mended layers run the fastest kernel with the model's window."""
    n, context = cell
    sliding, full = {
        "stock": ("vLLM FLASH_ATTN 4", "vLLM FLASH_ATTN 4"),
        "ours": ("ours", "ours"),
    }.get(system, ("ours, FA4" if n >= 4 else "ours", "vLLM FLASH_ATTN 4"))
    each = layer("sliding", sliding, n, context)
    if (
        system in ("mended", "tuned")
        and sliding == "ours"
        and context < SHAPE_26B["sliding_window"]
    ):
        each -= JOIN_MS
    return (LAYERS - FULL_LAYERS) * each + FULL_LAYERS * layer("full", full, n, context)


def layer(name: str, kernel: str, batch: int, context: int) -> float:
    """ms, between what was measured."""
    cells = [cell for cell in results("attention.json")["cells"] if cell["layer"] == name]
    table = {
        (cell["batch"], cell["context"]): cell["ms"][kernel]["median"]
        for cell in cells
        if kernel in cell["ms"]
    }
    batches, contexts = (sorted({key[i] for key in table}) for i in range(2))

    def at(number: int) -> float:
        return between(contexts, [table[number, c] for c in contexts], context)

    return between(batches, [at(number) for number in batches], batch)


def between(known: list[int], values: list[float], wanted: int) -> float:
    """Linear, and beyond the last two as between them."""
    i = min(max(bisect_right(known, wanted) - 1, 0), len(known) - 2)
    share = (wanted - known[i]) / (known[i + 1] - known[i])
    return values[i] + share * (values[i + 1] - values[i])


def floor_ms(scheme: str, cell: Cell) -> float:
    """No step is faster: one part after the other reads its weights at the speed of a copy, or
    multiplies at the data sheet's."""
    n = cell.concurrency
    rows = n * CANVAS

    def of(weights: float, used: float, kind: str) -> float:
        return max(BYTES[kind] * weights / COPY, 2 * rows * used / PEAK[kind])

    experts = LAYERS * EXPERT
    dense = 3 * LAYERS * HIDDEN * SHAPE_26B["intermediate_size"]
    heads, size, full_size = 16, SHAPE_26B["head_dim"], SHAPE_26B["global_head_dim"]
    sliding = LAYERS - FULL_LAYERS
    dense += sliding * HIDDEN * size * (2 * heads + 2 * 8) + FULL_LAYERS * HIDDEN * full_size * 34
    keys = CANVAS + min(cell.context, SHAPE_26B["sliding_window"] - 1)
    attended = sliding * size * keys + FULL_LAYERS * full_size * (CANVAS + cell.context)
    head = HIDDEN * VOCABULARY
    seconds = [
        of(experts * SHAPE_26B["num_experts"], experts * SHAPE_26B["top_k_experts"], scheme),
        of(dense, dense, scheme),
        2 * of(head, head, "bf16"),
        4 * rows * heads * attended / PEAK["bf16"],
    ]
    return 1000 * sum(seconds)


Lines = Callable[[], Iterator[str]]


class Reproduced(NamedTuple):
    scheme: str
    system: str
    cell: str
    measured: tuple[float, float]  # ms, of its runs
    predicted: float

    @property
    def error(self) -> float:
        """A share, of the nearest run."""
        low, high = self.measured
        return self.predicted / min(max(self.predicted, low), high) - 1


def reproduced() -> Iterator[Reproduced]:
    """Every step that was measured, by the model: as the weights routed then."""
    for scheme in PEAK:
        for system, found in results("steps.json")[scheme].items():
            for name, runs in found["cells"].items():
                cell, each = Cell.read(name), [run["ms_per_step"] for run in runs]
                read = MADE_UP
                if scheme == "bf16" and system == "stock":
                    # Its two canvases differ; 9.6 ms is neither, 10.4 the mean.
                    each = [statistics.mean(run["steps_ms"][2:]) for run in runs]
                    read = (MADE_UP + MADE_UP_LATER) / 2
                predicted = sum(step(system, scheme, cell, read).values())
                yield Reproduced(scheme, system, name, (min(each), max(each)), predicted)


class Prediction(NamedTuple):
    scheme: str
    cell: str
    ms: dict[str, float]  # by system
    measured: dict[str, float]  # ms, by system: `OURS`, and `STOCK` where it was run
    floor: float
    bar: float | None  # of stock's step

    def share(self, system: str) -> float:
        return self.ms[system] / self.ms["stock"]

    @property
    def measured_share(self) -> float | None:
        """Of stock's step."""
        return self.measured[OURS] / self.measured[STOCK] if STOCK in self.measured else None


def measured_even(scheme: str, cell: Cell) -> dict[str, float]:
    """ms of a step with even routing, by system."""
    systems = results("steps_even.json")[scheme]["results"]
    cells = {name: found["cells"].get(str(cell)) for name, found in systems.items()}
    return {name: found["ms_per_step"]["median"] for name, found in cells.items() if found}


def predictions() -> Iterator[Prediction]:
    """With even routing."""
    for scheme in PEAK:
        for cell in [Cell(n, 128) for n in (1, 8, 16, 32)] + [Cell(1, 8192), Cell(1, 32_768)]:
            if scheme == "bf16" and cell.concurrency > 1:
                continue
            ms = {system: sum(step(system, scheme, cell).values()) for system in SYSTEMS}
            measured, floor = measured_even(scheme, cell), floor_ms(scheme, cell)
            yield Prediction(scheme, str(cell), ms, measured, floor, bar(scheme, cell))


def prefill_ms() -> dict[str, float]:
    """Of a prompt of 32,768 tokens in FP8: measured; and ours with stock's time of attention."""
    measured = {
        system: results("timeline.json")["traces"][f"{system}-fp8-1x{LONGEST_CONTEXT}"][
            "prefill_ms"
        ]
        for system in ("ours", "stock")
    }
    ours, stock = measured["ours"], measured["stock"]
    mended = ours["span"] - ours[ATTENTION] + stock[ATTENTION]
    return {"stock": stock["span"], "ours": ours["span"], "mended": mended}


def measured_lines() -> Iterator[str]:
    """The steps that were measured, as a table."""
    yield "| scheme | system | requests x context | measured, ms | model | off by |"
    yield "|---|---|---|---|---|---|"
    for r in reproduced():
        low, high = (f"{ms:.1f}" for ms in r.measured)
        span = low if low == high else f"{low} to {high}"
        model = f"{r.predicted:.1f} | {r.error:+.1%}"
        yield f"| {r.scheme} | {r.system} | {r.cell} | {span} | {model} |"


def predicted_lines() -> Iterator[str]:
    """Predictions as a table, beside what was measured; in brackets the share of stock's step."""
    yield (
        "| scheme | requests x context | stock | stock, measured | ours, c611b1d | mended | tuned "
        "| ours, measured | goal | floor |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for p in predictions():
        ours = " | ".join(f"{p.ms[name]:.1f} ({p.share(name):.2f})" for name in SYSTEMS[1:])
        stock, found = (f"{p.measured[s]:.1f}" if s in p.measured else "" for s in (STOCK, OURS))
        share = "" if p.measured_share is None else f" ({p.measured_share:.2f})"
        goal = "" if p.bar is None else f"{p.bar:g}"
        yield (
            f"| {p.scheme} | {p.cell} | {p.ms['stock']:.1f} | {stock} | {ours} | {found}{share} "
            f"| {goal} | {p.floor:.1f} |"
        )


def missed_lines() -> Iterator[str]:
    """What is left where a goal is missed."""
    for p in predictions():
        if p.bar is not None and p.share("tuned") > p.bar:
            left = step("tuned", p.scheme, Cell.read(p.cell))
            largest = sorted(left.items(), key=lambda item: -item[1])[:6]
            named = ", ".join(f"{kind} {ms:.1f}" for kind, ms in largest)
            yield f"{p.scheme} {p.cell} misses {p.bar:g}: {named} ms of {p.ms['tuned']:.1f}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    prefill = prefill_ms()
    print(
        "Steps that were measured, experts as made-up weights route:", *measured_lines(), sep="\n"
    )
    print("\nWith even routing, ms a step:", *predicted_lines(), sep="\n")
    print("", *missed_lines(), sep="\n")
    text = ", ".join(f"{name} {ms:.0f}" for name, ms in prefill.items())
    print(f"\nPrompt of {LONGEST_CONTEXT:,} tokens, FP8, ms: {text}")
    report = {
        "reproduced": [r._asdict() for r in reproduced()],
        "predictions": [p._asdict() for p in predictions()],
        "prefill_ms": prefill,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
