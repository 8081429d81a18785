"""What the search may try, and intervals of accuracies and of differences between two."""

import json
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import FixedTrial
from scipy.stats import binomtest

from tests.paths import CHECKPOINTS
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.config.masked import check_asked_blocks, check_verified
from vllm_dllm.errors import InputError
from vllm_dllm.requests.options import server_defaults
from vllm_dllm.tools.tune.report import difference_interval, mean_interval
from vllm_dllm.tools.tune.search import Space

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
            [
                {"acceptance": "confidence", "accept_probability": 0.9},
                {"acceptance": "verified"},
            ],
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
