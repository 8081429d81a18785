"""Task files and names: found with their data, or refused with what to do. The report of several
tasks, one of which the first checkpoint fails."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.paths import CHECKPOINTS
from vllm_dllm.errors import InputError
from vllm_dllm.tools.evaluate import report
from vllm_dllm.tools.evaluate.report import Row, save_plot
from vllm_dllm.tools.evaluate.tasks import load_tasks
from vllm_dllm.tools.terminal import print_table

HELD_OUT = (CHECKPOINTS / "held_out.yaml").read_text()


def test_held_out_set_to_the_letter() -> None:
    (task,) = load_tasks([str(CHECKPOINTS / "held_out.yaml")], Path()).values()
    rows = [json.loads(line) for line in (CHECKPOINTS / "held_out.jsonl").read_text().splitlines()]
    docs = list(task.eval_docs)
    assert [task.doc_to_text(doc) for doc in docs] == [r["messages"][-1]["content"] for r in rows]
    assert [task.doc_to_target(doc) for doc in docs] == [row["answer"] for row in rows]


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


# name: (what is done to the task file, what the error says)
MALFORMED: dict[str, tuple[Callable[[str], str], str]] = {
    "no-yaml": (lambda _: "task: [", r"bad\.yaml' is not a task that can be used: ParserError"),
    "unknown-field": (replaced("{{answer}}", "{{reply}}"), r"'reply' is undefined"),
    "unknown-metric": (replaced("exact_match", "exact_mtch"), r"has the metric 'exact_mtch'"),
    "log-likelihoods": (
        replaced("generate_until", "loglikelihood"),
        r"must have answers that are generated \(output_type generate_until\), got loglikelihood",
    ),
    "no-data": (
        replaced("held_out.jsonl", "gone.jsonl"),
        r"the data of task '.*bad\.yaml' was not found \(Unable to find '.*gone\.jsonl'\)",
    ),
    "data-of-a-hub": (
        replaced("dataset_path: json", "dataset_path: someone/something"),
        r"was not found \(Couldn't reach 'someone/something' on the Hub .* give --data FOLDER",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_task_files_are_refused(tmp_path: Path, name: str) -> None:
    change, message = MALFORMED[name]
    (tmp_path / "held_out.jsonl").symlink_to(CHECKPOINTS / "held_out.jsonl")
    path = tmp_path / "bad.yaml"
    path.write_text(change(HELD_OUT))
    with pytest.raises(InputError, match=message) as refused:
        load_tasks([str(path)], Path())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [pytest.param("", "no rows", id="empty"), pytest.param('{"answer": 5', "JSON", id="cut-short")],
)
def test_data_that_cannot_be_read(tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "held_out.jsonl").write_text(rows)
    (tmp_path / "task.yaml").write_text(HELD_OUT)
    with pytest.raises(InputError, match=rf"task '.*task\.yaml' cannot be read: .*{message}"):
        load_tasks([str(tmp_path / "task.yaml")], Path())


GSM8K = {"question": "Tom has 3 cats and gets 4. How many?", "answer": "3 + 4 = 7\n#### 7"}
README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""


@pytest.mark.thorough  # all names of the harness are read
def test_names_of_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gsm8k from a local copy of its data set; what was not found is named."""
    folder = tmp_path / "data" / "openai" / "gsm8k"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for split in ("train", "test"):
        (folder / "main" / f"{split}.jsonl").write_text(6 * (json.dumps(GSM8K) + "\n"))
    (task,) = load_tasks(["gsm8k"], tmp_path / "data").values()
    assert task.doc_to_text(task.eval_docs[0]) == f"Question: {GSM8K['question']}\nAnswer:"

    for name, data_set in {
        "aime25": "math-ai/aime25",
        "gpqa_diamond_cot_zeroshot": "Idavidrein/gpqa",
    }.items():
        with pytest.raises(InputError, match=rf"task '{name}' was not found .*'{data_set}'"):
            load_tasks([name], tmp_path / "data")
    with pytest.raises(InputError, match=r"a task of lm-evaluation-harness, got 'gsm9k'"):
        load_tasks(["gsm9k"], tmp_path)


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


@pytest.mark.parametrize("width", [1, 40, 79])
def test_a_narrow_terminal_cuts_no_number(width: int) -> None:
    rows = report.with_recovery(ROWS)
    console = Console(record=True, width=width, file=io.StringIO())
    print_table(console, report.make_table(rows, report.describe_prompts(rows, 8)))
    text = console.export_text()
    assert "…" not in text
    for number in ("80.0", "100.0%", "150", "2.50", "4.00", "3.90"):
        assert re.search(rf" {number} ", text), text


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
