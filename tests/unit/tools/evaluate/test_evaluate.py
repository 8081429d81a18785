"""The command against a stub of a server: what it computes, what it says when things go wrong."""

import hashlib
import inspect
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

from tests.paths import CHECKPOINTS
from tests.processes import run as run_program
from tests.unit.tools.stub_server import ROWS, STUB, write_checkpoint, write_task
from vllm_dllm import cli
from vllm_dllm.tools import evaluate
from vllm_dllm.tools.evaluate.tasks import load_tasks

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
        return [sys.executable, "-c", STUB, str(checkpoint), str(port)]

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
