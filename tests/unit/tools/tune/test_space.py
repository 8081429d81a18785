"""What the search may try."""

import json
from pathlib import Path

import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import FixedTrial

from tests.paths import CHECKPOINTS
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.errors import InputError
from vllm_dllm.requests.options import server_defaults
from vllm_dllm.tools.tune.space import Space

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
    }


@pytest.mark.parametrize("is_masked", [False, True])
def test_every_suggestion_is_served(masked: Path, is_masked: bool) -> None:
    space = Space(masked if is_masked else TINY)
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    rules = set()
    for _ in range(60):
        keys = space.suggest(study.ask())
        server_defaults(keys, FAMILIES["SDARForCausalLM"] if is_masked else None)
        rules.add(keys["diffusion_acceptance"])
    assert rules == {"entropy_bound", "confidence", "top_k"}


def test_modes_are_searched(tmp_path: Path) -> None:
    """Nemotron's: verified drafts take no other key."""
    config = {"architectures": ["NemotronLabsDiffusionModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    space, family = Space(tmp_path), FAMILIES["NemotronLabsDiffusionModel"]
    own = {"diffusion_acceptance": "confidence", "diffusion_accept_probability": 0.9}
    assert space.suggest(FixedTrial(space.own())) == own
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    drawn = [space.suggest(study.ask()) for _ in range(30)]
    for keys in drawn:
        server_defaults(keys, family)
    assert {"diffusion_mode": "self_speculation"} in drawn and len({*map(str, drawn)}) > 10


def test_no_diffusion_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(InputError, match=r"no settings of a diffusion model .*max_denoising_steps"):
        Space(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json is not JSON"):
        Space(tmp_path)
