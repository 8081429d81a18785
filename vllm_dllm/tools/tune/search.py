"""The search itself: trials of settings, kept in a file, and those worth a second look."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from vllm_dllm.tools.tune.space import Space, Value

PRESET = "preset"
"""Marks the trial of `Space.presets()` with this index. 0 is the checkpoint's own settings."""
_UNBROKEN = (TrialState.COMPLETE, TrialState.WAITING)


@dataclass(frozen=True)
class Measured:
    """What the server made of some prompts."""

    scores: tuple[float, ...]
    """One per prompt, in the order of the prompts, 0 to 1."""
    tokens: int
    """Generated, up to and including the end of each answer."""
    forwards: int
    """How many forwards of canvases there were: denoise steps and commits."""
    seconds: float

    @property
    def accuracy(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def tokens_per_forward(self) -> float:
        """Is the same on every machine, unlike tokens per second."""
        return self.tokens / max(1, self.forwards)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Measured":
        return cls(**{**fields, "scores": tuple(fields["scores"])})


@dataclass(frozen=True)
class Tried:
    number: int
    keys: Mapping[str, Value]
    """What each request was given."""
    measured: Measured
    is_own: bool

    @property
    def rule(self) -> Value:
        """How tokens come to stand."""
        return self.keys.get("diffusion_mode") or self.keys["diffusion_acceptance"]

    @classmethod
    def from_trial(cls, trial: FrozenTrial) -> "Tried":
        kept = trial.user_attrs
        return cls(
            trial.number, kept["keys"], Measured.from_json(kept["measured"]), kept.get(PRESET) == 0
        )


def search(
    file: Path,
    space: Space,
    trials: int,
    measure: Callable[[Mapping[str, Value]], Measured],
    on_trial: Callable[[Tried], None],
) -> list[Tried]:
    """Measures settings until `trials` of them are in `file`, the presets first. Those that `file`
    holds from an earlier run count; a preset that was stopped is measured again."""
    storage = JournalStorage(JournalFileBackend(str(file)))
    study = optuna.create_study(
        study_name="tune", storage=storage, directions=["maximize"] * 2, load_if_exists=True
    )
    for stopped in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(stopped.number, state=TrialState.FAIL)
    # A run that goes on must not draw what it drew before.
    study.sampler = TPESampler(seed=len(study.get_trials(deepcopy=False)))
    known = {trial.user_attrs.get(PRESET) for trial in study.get_trials(states=_UNBROKEN)}
    for number, parameters in enumerate(space.presets()):
        if number not in known:
            study.enqueue_trial(parameters, user_attrs={PRESET: number})
    while len(_finished(study)) < trials:
        trial = study.ask()
        keys = space.suggest(trial)
        measured = measure(keys)
        trial.set_user_attr("keys", keys)
        trial.set_user_attr("measured", asdict(measured))
        on_trial(
            Tried.from_trial(study.tell(trial, [measured.accuracy, measured.tokens_per_forward]))
        )
    return _finished(study)


def _finished(study: optuna.Study) -> list[Tried]:
    states = (TrialState.COMPLETE,)
    return [Tried.from_trial(trial) for trial in study.get_trials(deepcopy=False, states=states)]


def pareto_front(tried: list[Tried]) -> list[Tried]:
    """Picks the settings that no other beats in accuracy without being slower, or the other way
    round, and of equal ones the first. They are ordered by rising tokens per forward."""
    ordered = sorted(
        tried, key=lambda t: (-t.measured.tokens_per_forward, -t.measured.accuracy, t.number)
    )
    best: list[Tried] = []
    for candidate in ordered:
        if not best or candidate.measured.accuracy > best[-1].measured.accuracy:
            best.append(candidate)
    return best[::-1]
