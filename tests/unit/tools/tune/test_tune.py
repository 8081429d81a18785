"""`vllm-dllm tune`: what the search may try, what it finds and says, and its intervals."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import FixedTrial
from scipy.stats import binomtest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.paths import CHECKPOINTS
from tests.unit.tools.stub_server import stub_command, write_checkpoint, write_task
from vllm_dllm import cli
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.masked import check_asked_blocks, check_verified
from vllm_dllm.errors import InputError
from vllm_dllm.requests.options import server_defaults
from vllm_dllm.tools import evaluate, tune
from vllm_dllm.tools.tune.report import difference_interval, mean_interval
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
    monkeypatch.setattr(evaluate, "serve_command", stub_command)
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


TINY = CHECKPOINTS / "diffusiongemma-tiny"


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["SDARForCausalLM"]}))
    return tmp_path


def test_own_settings() -> None:
    space = Space(TINY)
    assert space.suggest(FixedTrial(space.own())) == {
        "diffusion_acceptance": "entropy_bound",
        "diffusion_entropy_bound": 0.1,
        "diffusion_max_steps": 48,
        "diffusion_t_max": 0.8,
        "diffusion_t_min": 0.4,
        "diffusion_confidence_threshold": 0.005,
        "diffusion_stability_threshold": 1,
        "diffusion_judge_answer_only": 0,
    }


def test_own_settings_of_a_masked_model(masked: Path) -> None:
    space = Space(masked)
    assert space.suggest(FixedTrial(space.own())) == {
        "diffusion_acceptance": "confidence",
        "diffusion_accept_probability": 0.85,
        "diffusion_blocks_in_flight": 1,
    }


FAST_DLLM = "Fast_dLLM_QwenForCausalLM"
LLADA2 = "LLaDA2MoeModelLM"
NEMOTRON = "NemotronLabsDiffusionModel"
SDAR = "SDARForCausalLM"
SEARCHED = {  # architecture: keys beside the three rules' own
    SDAR: {"blocks_in_flight"},
    LLADA2: {"blocks_in_flight", "edit_probability"},
    NEMOTRON: {"mode"},
    FAST_DLLM: set(),
}


@pytest.mark.parametrize("architecture", [None, *SEARCHED])
def test_every_suggestion_and_preset_is_served(tmp_path: Path, architecture: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    space = Space(TINY if architecture is None else tmp_path)
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    presets = [space.suggest(FixedTrial(preset)) for preset in space.presets()]
    drawn = [space.suggest(study.ask()) for _ in range(60)]
    for keys in presets + drawn:
        family = FAMILIES[architecture] if architecture else None
        in_flight = space.settings_for(keys).get("blocks_in_flight", 1)
        check_verified(keys.get("diffusion_acceptance"), family, in_flight)
        check_asked_blocks(
            server_defaults(keys, family).get("blocks_in_flight"),
            space.server_settings.get("blocks_in_flight", 1),
        )
    rules = {"entropy_bound", "confidence", "top_k"}
    if architecture in (SDAR, LLADA2, FAST_DLLM):
        rules.add("verified")
    assert {keys.get("diffusion_acceptance") for keys in drawn} - {None} == rules
    if architecture is not None:
        found = {key.removeprefix("diffusion_") for keys in drawn for key in keys}
        rules_own = {"acceptance", "accept_probability", "accept_tokens", "entropy_bound"}
        assert found - rules_own == SEARCHED[architecture]


@pytest.mark.parametrize(
    ("architecture", "presets"),
    [
        (
            SDAR,
            [
                {"acceptance": "top_k", "accept_tokens": 1},
                {"acceptance": "verified"},
                {"acceptance": "confidence", "accept_probability": 0.85, "blocks_in_flight": 4},
            ],
        ),
        (NEMOTRON, [{"mode": "self_speculation"}]),
        (
            FAST_DLLM,
            [{"acceptance": "confidence", "accept_probability": 0.9}, {"acceptance": "verified"}],
        ),
    ],
)
def test_presets_of_a_family(
    tmp_path: Path, architecture: str, presets: list[dict[str, object]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    space = Space(tmp_path)
    own, *others = (space.suggest(FixedTrial(preset)) for preset in space.presets())
    assert own == space.suggest(FixedTrial(space.own()))
    assert others == [
        {f"diffusion_{key}": value for key, value in preset.items()} for preset in presets
    ]


def test_a_server_as_in_the_trial(masked: Path) -> None:
    """One block in flight needs no wider canvas, unless edits wait for all blocks of a canvas."""
    space, one = Space(masked), {"diffusion_acceptance": "confidence"}
    key, edits = "diffusion_blocks_in_flight", {"diffusion_edit_probability": 0.5}
    assert space.settings_for(one | {key: 1}) == {"defaults": one}
    for keys in (one | {key: 2}, one | {key: 1} | edits):
        assert space.settings_for(keys) == {"blocks_in_flight": 4, "defaults": keys}
    keys = {"diffusion_acceptance": "verified"}
    assert space.settings_for(keys) == {"blocks_in_flight": 2, "defaults": keys}
    assert Space(masked, ["--additional-config={}"]).server_settings == {}


def test_blocks_in_flight_that_the_user_has_set_are_not_searched(masked: Path) -> None:
    space = Space(masked, ["--additional-config", '{"vllm_dllm": {"blocks_in_flight": 2}}'])
    assert all("blocks_in_flight" not in preset for preset in space.presets())


def test_no_diffusion_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(InputError, match=r"no settings of a diffusion model .*max_denoising_steps"):
        Space(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json is not JSON"):
        Space(tmp_path)


@pytest.mark.parametrize(
    ("right", "count"), [(0, 1), (1, 1), (4, 4), (0, 40), (31, 40), (253, 253)]
)
def test_wilson(right: int, count: int) -> None:
    found = mean_interval([1.0] * right + [0.0] * (count - right))
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.low <= found.value == right / count <= found.high


def test_the_difference_holds_in_19_of_20_draws() -> None:
    """Of prompts that get worse and better by chance, the true difference is inside."""
    generator = np.random.default_rng(0)
    shares, draws, inside = (0.04, 0.01, 0.95), 2000, 0
    for _ in range(draws):
        change = generator.choice((-1.0, 1.0, 0.0), size=250, p=shares)
        before = np.where(change == 0, 1.0, (change < 0).astype(float))
        interval = difference_interval(before + change, before)
        inside += interval.low <= 0.01 - 0.04 <= interval.high
    assert inside >= 0.95 * draws


def test_equal_answers() -> None:
    """Nothing has changed, but that says only so much of other prompts."""
    interval = difference_interval([1.0] * 100, [1.0] * 100)
    assert interval.value == 0.0
    assert interval.low == -interval.high < 0.0
