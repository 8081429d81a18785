"""The command against a stub of a server: task files, what it computes and reports, what it says
when things go wrong."""

import hashlib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import lm_eval.tasks
import pandas as pd
import pytest
from lm_eval.tasks._yaml_loader import load_yaml
from rich.console import Console

from tests.paths import CHECKPOINTS
from tests.processes import run as run_program
from tests.unit.tools.stub_server import ROWS, stub_command, write_checkpoint, write_task
from vllm_dllm import cli
from vllm_dllm.errors import InputError
from vllm_dllm.tools import evaluate
from vllm_dllm.tools.evaluate import report
from vllm_dllm.tools.evaluate.report import Row, save_plot
from vllm_dllm.tools.evaluate.tasks import load_tasks
from vllm_dllm.tools.terminal import print_table

TASKS = CHECKPOINTS / "tasks"
Make = Callable[[str, dict[str, str]], str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a checkpoint whose server is the stub, beside a task of `ROWS`."""
    write_task(tmp_path, ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # must not be asked

    def command(checkpoint: Path, port: int, *options: str) -> list[str]:
        assert "vllm_dllm.tools.scrape.WeightSizes" in options
        return stub_command(checkpoint, port)

    monkeypatch.setattr(evaluate, "serve_command", command)
    return lambda name, answers: str(write_checkpoint(tmp_path / name, ROWS | answers))


@pytest.mark.slow
@pytest.mark.parametrize(("api", "concurrency"), [("chat", "3"), ("completions", "1")])
def test_two_checkpoints(
    make: Make, temporary: Path, capsys: pytest.CaptureFixture[str], api: str, concurrency: str
) -> None:
    checkpoints = [make("good", {"Hi!": "Hi?"}), make("worse", {"Hi!": "Hi?", "Sort: b a": "b a"})]
    options = ["--task", "task.yaml", "--api", api, "--concurrency", concurrency, "-o", "out"]
    assert cli.main(["eval", *checkpoints, *options]) == 0
    assert not list(temporary.iterdir()), "logs of a good run"
    out = capsys.readouterr().out
    assert re.search(r"good +75\.0 ± 25\.0 +100\.0% +\d+ +3\.00 +0\.00 +0\.00", out), out
    assert re.search(r"worse +50\.0 ± 28\.9 +66\.7% ", out), out
    found = json.loads(Path("out/eval.json").read_text())
    assert found["machine"]["versions"].keys() >= {"vllm-dllm", "lm-eval", "torch"}
    digest = hashlib.sha256(bytes(3000)).hexdigest()
    assert found["weights"] == {path: {"model.safetensors": digest} for path in checkpoints}
    assert re.fullmatch("[0-9a-f]{40}", found["machine"]["commit"])
    (good, worse) = found["rows"]
    assert (good["task"], good["score"], good["prompts"]) == ("held_out", "exact_match", 4)
    assert (good["accuracy"], worse["accuracy"], worse["recovery"]) == (0.75, 0.5, 0.5 / 0.75)
    assert (good["tokens"], good["steps_per_block"]) == (200, 3.0)  # the first answer warms up
    assert (good["disk_bytes"], good["weight_bytes"]) == (3000, 2000)
    assert good["tokens_per_second"] == pytest.approx(200 / good["seconds"])
    assert Path("out/eval.png").read_bytes().startswith(b"\x89PNG")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["eval", *arguments]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "inside"),
    [({}, "127.0.0.1"), ({"NO_PROXY": "a,b"}, "a,b,127.0.0.1"), ({"no_proxy": ""}, "127.0.0.1")],
)
def test_servers_are_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], inside: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    evaluate.ask_without_proxy()
    assert os.environ["no_proxy"] == inside


def test_limit(make: Make) -> None:
    options = ["--task", "task.yaml", "--limit", "1", "-o", "out"]
    assert cli.main(["eval", make("good", {"Hi!": "DIE"}), *options]) == 0
    (row,) = json.loads(Path("out/eval.json").read_text())["rows"]
    assert (row["prompts"], row["accuracy"], row["stderr"]) == (1, 1.0, None)


def test_other_models_are_asked_at_the_tasks_temperature(make: Make) -> None:
    """Also those that write one token after the other. The stub accepts no other temperature."""
    checkpoint, task = Path(make("other", {})), Path("task.yaml")
    config = {"architectures": ["Qwen3ForCausalLM"], "temperature": 0.25}
    (checkpoint / "config.json").write_text(json.dumps(config))
    task.write_text(task.read_text().replace("temperature: 1.0", "temperature: 0.25"))
    assert cli.main(["eval", str(checkpoint), "--task", "task.yaml", "-o", "out"]) == 0


def test_a_server_that_dies(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    dying = make("dying", {"Hi!": "DIE"})
    error = run(capsys, dying, "--task", "task.yaml", "-o", "out")
    assert re.match(r"vllm-dllm eval: the server ended \(9\)\. From its log, .*dying.*\.log", error)
    assert "RuntimeError: out of memory" in error
    assert not list(Path("out").iterdir())


@pytest.mark.slow
def test_a_server_that_refuses(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    error = run(capsys, make("strict", {"Hi!": "REFUSE"}), "--task", "task.yaml")
    found = re.search(r"did not answer task 'held_out' \(400,.*See (\S+lm_eval\.log)\n$", error)
    assert found, error
    assert "the prompt is too long" in Path(found.group(1)).read_text()


def test_bad_input(make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good = make("good", {})
    assert re.search(r"there is no folder 'gone'", run(capsys, "gone"))
    assert "there is no folder 'gone'" in run(capsys, good, "gone", "--task", "task.yaml")
    assert "there is no task file 'gone.yaml'" in run(capsys, good, "--task", "gone.yaml")
    assert "there is no task file 'checkpoints/held_out.yaml'" in run(capsys, good)
    assert "--limit must be at least 1, got 0" in run(capsys, good, "--limit", "0")
    assert "--concurrency must be at least 1, got -2" in run(capsys, good, "--concurrency", "-2")
    assert "a checkpoint is named twice" in run(capsys, good, good)
    assert "--data: there is no folder 'gone'" in run(capsys, good, "--data", "gone")
    for out in ("task.yaml", "/proc/nope/out"):
        assert "-o must name a folder that can be written: [Errno" in run(capsys, good, "-o", out)
    (Path(good) / "config.json").unlink()
    assert "has no config.json" in run(capsys, good, "--task", "task.yaml")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two made-up rows of each public data set, as its own files hold them."""

    def path(name: str) -> Path:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        return tmp_path / "data" / name

    numbers = (2, 5)
    rows: list[dict[str, str]]
    rows = [
        {"question": f"1 + {n}?", "answer": f"1 + {n} = {1 + n}\n#### {1 + n}"} for n in numbers
    ]
    for split, count in (("train", 3), ("test", 1)):  # five examples stand before each question
        file = path(f"openai/gsm8k/main/{split}-00000-of-00001.parquet")
        pd.DataFrame(count * rows).to_parquet(file)
    rows = [{"problem": f"2 + {n}?", "answer": f"{2 + n}"} for n in numbers]
    pd.DataFrame(rows).to_json(path("math-ai/aime25/test.jsonl"), orient="records", lines=True)
    wrong = {f"Incorrect Answer {i}": f"9{i} cats" for i in (1, 2, 3)}
    rows = [{"Question": f"3 + {n}?", "Correct Answer": f"{3 + n} cats"} | wrong for n in numbers]
    pd.DataFrame(rows).to_csv(path("Idavidrein/gpqa/gpqa_diamond.csv"), index=False)
    return tmp_path / "data"


@pytest.mark.slow
def test_public_tasks(
    make: Make, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped task files: of each one's two rows the first is answered rightly."""
    specs = [str(TASKS / f"{name}.yaml") for name in ("gsm8k", "aime25", "gpqa_diamond")]
    tasks = load_tasks(specs, data)
    monkeypatch.setattr(evaluate, "load_tasks", lambda *_: tasks)  # choices are shuffled but once
    answers = {}
    for name, answer in (
        ("gsm8k", "#### 3"),
        ("aime25", r"It is $\boxed{4}$, as"),
        ("gpqa_diamond", "The answer is {}."),
    ):
        first = next(iter(tasks[name].eval_docs))
        right = answer.replace("{}", str(tasks[name].doc_to_target(first)))
        answers[str(tasks[name].doc_to_text(first))] = right
    options = [f"--task={spec}" for spec in specs]
    command = ["eval", make("good", answers), *options, "--data", str(data), "-o", "out"]
    assert cli.main(command) == 0, capsys.readouterr().err
    found = json.loads(Path("out/eval.json").read_text())
    assert {(row["task"], row["score"]): row["accuracy"] for row in found["rows"]} == {
        ("gsm8k", "exact_match, strict-match"): 0.5,
        ("gsm8k", "exact_match, flexible-extract"): 0.5,
        ("aime25", "exact_match"): 0.5,
        ("gpqa_diamond", "exact_match, strict-match"): 0.5,
        ("gpqa_diamond", "exact_match, flexible-extract"): 0.5,
    }
    assert {row["prompts"] for row in found["rows"]} == {2}
    # Room for AIME's answers, and for prompts.
    assert found["serve_options"][:2] == ["--max-model-len", str(32768 + 1024)]


def test_public_tasks_are_the_harness_own() -> None:
    """But for where data lies and how long answers may be."""
    ours = {"task", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "include"}
    for name, own in (
        ("gsm8k", "gsm8k/gsm8k.yaml"),
        ("aime25", "aime/aime25.yaml"),
        ("gpqa_diamond", "gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml"),
    ):
        shipped = load_yaml(TASKS / f"{name}.yaml")
        original = load_yaml(Path(lm_eval.tasks.__file__).parent / own)
        original["generation_kwargs"] = {"max_gen_toks": 0} | original["generation_kwargs"]
        if original["generation_kwargs"]["max_gen_toks"] == 0:
            shipped["generation_kwargs"]["max_gen_toks"] = 0
        for config in (shipped, original):
            for key in ("process_results", "process_docs"):
                if key in config:
                    config[key] = inspect.getsource(config[key])
        assert {k: v for k, v in shipped.items() if k not in ours} == {
            k: v for k, v in original.items() if k not in ours
        }


def test_a_context_that_holds_no_answer(
    make: Make, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--task={TASKS / 'aime25'}.yaml", "--data", str(data)]
    error = run(capsys, make("good", {}), *options, "--serve-options=--max-model-len 1024")
    assert "task 'aime25' asks for answers of up to 32768 tokens (max_gen_toks): " in error
    assert "got 1024" in error


@pytest.mark.slow
def test_without_the_extra() -> None:
    script = (
        "import sys; sys.modules['lm_eval'] = None; "
        "from vllm_dllm import cli; sys.exit(cli.main(['eval', 'x']))"
    )
    result = run_program(sys.executable, "-c", script)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "vllm-dllm eval: there is no lm_eval here: pip install 'vllm-dllm[eval]'"
    ]


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


REPORTED = [
    row("a", "x", 0.8),
    row("a", "y", 0.0),
    row("b", "x", 0.6),
    row("b", "y", 0.1, steps=None),
]


def test_recovery_is_of_the_same_task() -> None:
    found = [r.recovery for r in report.with_recovery(REPORTED)]
    assert found == [1.0, None, 0.6 / 0.8, None]


@pytest.mark.parametrize("width", [1, 40, 79])
def test_a_narrow_terminal_cuts_no_number(width: int) -> None:
    rows = report.with_recovery(REPORTED)
    console = Console(record=True, width=width, file=io.StringIO())
    print_table(console, report.make_table(rows, report.describe_prompts(rows, 8)))
    text = console.export_text()
    assert "…" not in text
    for number in ("80.0", "100.0%", "150", "2.50", "4.00", "3.90"):
        assert re.search(rf" {number} ", text), text


def test_table_and_picture(tmp_path: Path) -> None:
    rows = report.with_recovery(REPORTED)
    console = Console(record=True, width=110, file=(tmp_path / "table").open("w"))
    console.print(report.make_table(rows, report.describe_prompts(rows, 8)))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["a", "x,", "exact_match", "80.0", "100.0%", "150", "2.50", "4.00", "3.90"] in lines
    assert ["b", "y,", "exact_match", "10.0", "-", "150", "-", "4.00", "3.90"] in lines
    assert report.describe_prompts(rows, 8) == "10 prompts of x, 10 prompts of y, 8 at once"
    save_plot(rows, "somewhere", tmp_path / "new" / "eval.png")
    assert (tmp_path / "new" / "eval.png").read_bytes().startswith(b"\x89PNG")
