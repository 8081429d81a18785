"""Recovery, the table and the picture of several tasks, one of which the first checkpoint fails."""

from pathlib import Path

from rich.console import Console

from vllm_dllm.tools.evaluate import report
from vllm_dllm.tools.evaluate.report import Row, save_plot


def row(checkpoint: str, task: str, accuracy: float, steps: float | None = 2.5) -> Row:
    return Row(
        checkpoint=f"checkpoints/{checkpoint}",
        task=task,
        score="exact_match",
        accuracy=accuracy,
        stderr=None,
        prompts=10,
        tokens=300,
        seconds=2.0,
        steps_per_block=steps,
        disk_bytes=4_000_000,
        weight_bytes=3_900_000,
    )


ROWS = [row("a", "x", 0.8), row("a", "y", 0.0), row("b", "x", 0.6), row("b", "y", 0.1, steps=None)]


def test_recovery_is_of_the_same_task() -> None:
    found = [r.recovery for r in report.with_recovery(ROWS)]
    assert found == [1.0, None, 0.6 / 0.8, None]


def test_table_and_picture(tmp_path: Path) -> None:
    rows = report.with_recovery(ROWS)
    console = Console(record=True, width=110, file=(tmp_path / "table").open("w"))
    console.print(report.make_table(rows, report.describe_prompts(rows, 8)))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["a", "x,", "exact_match", "80.0", "100.0%", "150", "2.50", "4.00", "3.90"] in lines
    assert ["b", "y,", "exact_match", "10.0", "-", "150", "-", "4.00", "3.90"] in lines
    assert report.describe_prompts(rows, 8) == "10 prompts of x, 10 prompts of y, 8 at once"
    save_plot(rows, "somewhere", tmp_path / "new" / "eval.png")
    assert (tmp_path / "new" / "eval.png").read_bytes().startswith(b"\x89PNG")
