"""The command against a stub of a server: what it finds, and what it says when it cannot."""

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.paths import CHECKPOINTS
from tests.unit.tools.stub_server import STUB, write_checkpoint, write_task
from vllm_dllm import cli
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.requests.options import server_defaults
from vllm_dllm.tools import evaluate, tune
from vllm_dllm.tools.tune.search import Measured, Space, Tried, pareto_front, search

ROWS = {f"Count to {n}.": str(n) for n in range(1, 17)}
"""An answer needs as many steps as it says. The odd ones are searched with."""
TRIALS = 12
Tune = Callable[..., int]


@pytest.fixture
def run_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    write_task(tmp_path, ROWS)
    checkpoint = write_checkpoint(tmp_path / "model", ROWS)
    own = CHECKPOINTS / "diffusiongemma-tiny" / "generation_config.json"
    shutil.copy(own, checkpoint)
    monkeypatch.chdir(tmp_path)

    def command(checkpoint: Path, port: int, *options: str) -> list[str]:
        return [sys.executable, "-c", STUB, str(checkpoint), str(port)]

    monkeypatch.setattr(evaluate, "serve_command", command)
    options = ["--task", "task.yaml", "--trials", str(TRIALS), "--concurrency", "4"]
    return lambda *further: cli.main(["tune", "model", *options, *further])


def share_within(keys: dict[str, Any], numbers: range) -> float:
    return sum(n <= keys["diffusion_max_steps"] for n in numbers) / len(numbers)


@pytest.mark.slow
def test_finds_the_fastest_that_is_right(
    run_tune: Tune, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tune() == 0
    assert not list(temporary.iterdir()), "logs of a good run"
    assert "vllm serve model --config tuning/defaults.yaml" in capsys.readouterr().out
    assert {file.name for file in Path("tuning").iterdir()} == {
        "defaults.yaml",
        "tune.json",
        "tune.png",
    }
    found = json.loads(Path("tuning/tune.json").read_text())
    assert len(found["searched"]) == TRIALS
    own, *others = found["searched"]
    assert own["own"] and own["keys"]["diffusion_max_steps"] == 48
    for trial in (own, *others):
        assert trial["accuracy"] == share_within(trial["keys"], range(1, 17, 2))
        assert trial["forwards"] == 8 * 2 * (trial["keys"]["diffusion_max_steps"] + 1)

    confirmed = found["confirmed"]
    assert own["trial"] in [row["trial"] for row in confirmed]
    for row in confirmed:
        assert row["accuracy"] == share_within(row["keys"], range(2, 17, 2))
        assert row["accuracy_95"][0] <= row["accuracy"] <= row["accuracy_95"][1]
        assert row["difference"] == row["accuracy"] - 1
    (chosen,) = (row for row in confirmed if row["chosen"])
    right = [row for row in confirmed if row["accuracy"] == 1]
    assert chosen["tokens_per_forward"] == max(row["tokens_per_forward"] for row in right)
    assert len(confirmed) > 1

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    options = parser.parse_args(parser.load_config_file("tuning/defaults.yaml"))
    defaults = ExtensionConfig.from_additional_config(options.additional_config).defaults
    assert defaults == chosen["keys"]
    server_defaults(defaults, None)


@pytest.mark.slow
def test_goes_on_after_a_stop(
    run_tune: Tune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the search and while confirming: what was measured is not measured again."""
    counter, evaluate = itertools.count(1), tune.evaluate
    tried: list[dict[str, Any]] = []

    def stopped(*args: Any, **options: Any) -> Any:
        if next(counter) in (4, TRIALS + 3):
            raise KeyboardInterrupt
        tried.append(dict(options["options"]))
        return evaluate(*args, **options)

    monkeypatch.setattr(tune, "evaluate", stopped)
    for _ in range(2):
        assert run_tune() == 130
        assert "stopped; the same command continues from here" in capsys.readouterr().err
        assert not Path("tuning").exists()
    assert run_tune("--limit", "8") == 1
    assert "tuning.partial is left from a run with another checkpoint, task" in (
        capsys.readouterr().err
    )
    assert run_tune() == 0
    found = json.loads(Path("tuning/tune.json").read_text())
    assert tried[:TRIALS] == [trial["keys"] for trial in found["searched"]]
    assert len({json.dumps(keys) for keys in tried[:TRIALS]}) == TRIALS  # none drawn twice
    assert len(tried) == TRIALS + len(found["confirmed"])
    assert run_tune() == 1
    assert "tuning exists already" in capsys.readouterr().err


def test_bad_input(run_tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*options: str) -> str:
        assert run_tune(*options) == 1
        return capsys.readouterr().err

    assert "--trials must be at least 1, got 0" in error("--trials", "0")
    assert "--limit must be at least 8, got 7" in error("--limit", "7")
    assert "--max-loss must be in points from 0 to below 100, got -1" in error("--max-loss", "-1")
    assert "there is no task file 'gone.yaml'" in error("--task", "gone.yaml")
    write_task(Path("."), dict(list(ROWS.items())[:7]))
    assert "must have at least 8 prompts, got 7" in error()
    assert not Path("tuning.partial").exists()


def test_a_preset_that_was_stopped_comes_before_the_others(tmp_path: Path) -> None:
    """Or the trials might end before the checkpoint's own settings, which others are compared
    with."""
    (tmp_path / "config.json").write_text('{"architectures": ["SDARForCausalLM"]}')

    def stop(keys: object) -> Measured:
        raise KeyboardInterrupt

    arguments = tmp_path / "trials.log", Space(tmp_path), 3
    with pytest.raises(KeyboardInterrupt):
        list(search(*arguments, stop))
    for _ in range(2):
        tried = list(search(*arguments, lambda keys: Measured([1.0], 10, 5, 1.0)))
        assert [trial.is_own for trial in tried] == [True, False, False]
    assert len({json.dumps(trial.keys) for trial in tried}) == 3


def test_front() -> None:
    """Against a comparison of each with each."""
    numbers = [(0.9, 10), (0.9, 12), (1.0, 5), (0.8, 12), (0.8, 20), (1.0, 5), (0.5, 3)]
    tried = [
        Tried(i, {}, Measured((accuracy,), forwards * 10, 10, 1.0), False)
        for i, (accuracy, forwards) in enumerate(numbers)
    ]
    assert [t.number for t in pareto_front(tried)] == [2, 1, 4]
