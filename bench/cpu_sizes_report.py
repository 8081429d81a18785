"""Tables, bars and the picture of `bench.cpu_sizes`."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import harness

TRANSFORMERS, SMALLEST = "transformers", "4M"
OF_BF16 = {  # of the speed at least, of the memory at most
    "fp8": (0.95, 0.6),
    "int8": (0.95, 0.6),
    "nvfp4": (0.8, 0.4),
    "w4a16": (0.8, 0.4),
}
OVER_TRANSFORMERS = {"1": 2.5, "8": 2.0, "32": 2.0}
LABELS = {
    "canvas": "canvas, tokens",
    "context": "context, tokens",
    "vocabulary": "vocabulary, tokens",
    "batch": "requests at once",
}


def bars(shapes: dict[str, Any]) -> list[dict[str, Any]]:
    """What is asked of the numbers, and whether it is met."""
    found: list[dict[str, Any]] = []
    for shape, measured in shapes.items():
        for number, group in enumerate(measured["groups"]):
            smallest = shapes.get(SMALLEST, measured)["groups"][number]
            for name, cells in group.items():
                theirs = group.get(f"{TRANSFORMERS}, {name}", {})
                for count, bar in OVER_TRANSFORMERS.items():
                    if (ratio := _faster(cells, theirs, count)) is not None:
                        what = f"{shape}, {name}, {count} at once, over transformers"
                        found.append(harness.bar(what, ratio, at_least=bar))
                if name not in OF_BF16 or "bf16" not in group:
                    continue
                speed, memory = OF_BF16[name]
                for count in OVER_TRANSFORMERS:
                    if (ratio := _faster(cells, group["bf16"], count)) is not None:
                        what = f"{shape}, {name}, {count} at once, over bf16"
                        found.append(harness.bar(what, ratio, at_least=speed))
                sizes = [_above(group, smallest, of) for of in (name, "bf16")]
                if sizes[1] > 0:
                    what, share = f"{shape}, {name}, memory", sizes[0] / sizes[1]
                    found.append(harness.bar(what, share, at_most=memory))
    return found


def _above(group: dict[str, Any], smallest: dict[str, Any], name: str) -> int:
    """Resident bytes of a system above those of the smallest shape's, which has hardly any
    weights."""
    return group[name]["resident_bytes"] - smallest[name]["resident_bytes"]


def _faster(cells: dict[str, Any], than: dict[str, Any], count: str) -> float | None:
    """How often `cells` do what `than` do once; None if one of them was not run."""
    pair = [of.get(count, {}).get("ms_per_step") for of in (cells, than)]
    return pair[1]["median"] / pair[0]["median"] if all(pair) else None


def print_tables(report: dict[str, Any]) -> None:
    """In Markdown, as LOG.md has it."""
    console = Console(width=160)
    for shape, measured in report["shapes"].items():
        for group in measured["groups"]:
            first = next(iter(group.values()))
            counts = [key for key in first if key != "resident_bytes"]
            table = Table(box=box.MARKDOWN)
            table.add_column(f"{shape}, ms a step (extremes)")
            for count in counts:
                table.add_column(f"{count} at once", justify="right")
            table.add_column("resident, MB", justify="right")
            table.add_column("peak, MB", justify="right")
            for name, cells in group.items():
                peak = max(cells[count].get("peak_bytes", 0) for count in counts)
                sizes = (f"{size / 1e6:.4g}" for size in (cells["resident_bytes"], peak))
                table.add_row(name, *(_show(cells[count]) for count in counts), *sizes)
            console.print(table)
        sizes = (f"{name} {size / 1e6:.4g}" for name, size in measured["disk_bytes"].items())
        print(f"{shape}, MB on disk: {', '.join(sizes)}")
    for axis, found in report["growth"].items():
        exponent, fit = found["fit"]["exponent"], found["fit"]
        of = f"{axis} ** {exponent:.2f} from {fit['from']} to {fit['to']}"
        print(f"growth, {found['shape']}, {found['format']}: {of}")
    harness.print_bars(report["bars"])


def _show(cell: dict[str, Any]) -> str:
    if "not_run" in cell:
        return "not run"
    ms = cell["ms_per_step"]
    return f"{ms['median']:.4g} ({ms['min']:.4g} to {ms['max']:.4g})"


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel for each thing that grows: medians, the extremes, and the fitted line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    growth = report["growth"]
    figure, panels = plt.subplots(1, len(growth), figsize=(4.2 * len(growth), 4), squeeze=False)
    for axes, (axis, found) in zip(panels[0], growth.items(), strict=True):
        # A logarithmic axis has no 0.
        points = {int(size): p for size, p in found["points"].items() if int(size) > 0}
        medians = [p["median"] for p in points.values()]
        below = [p["median"] - p["min"] for p in points.values()]
        above = [p["max"] - p["median"] for p in points.values()]
        axes.errorbar(list(points), medians, yerr=[below, above], fmt="o", capsize=3)
        fit = found["fit"]
        ends = [fit["from"], fit["to"]]
        line = [fit["factor_ms"] * end ** fit["exponent"] for end in ends]
        axes.plot(ends, line, "--", label=f"exponent {fit['exponent']:.2f}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(LABELS[axis])
        axes.set_ylabel("ms a step")
        axes.set_title(f"{found['shape']}, {found['format']}", fontsize=9)
        axes.legend(fontsize=8)
    machine = report["machine"]
    figure.suptitle(f"{machine['cores']} cores, {machine['cpu']}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
