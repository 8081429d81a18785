"""The search itself: trials of settings, which are kept in a file, and the choice of the best
trials."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from vllm_dllm.tools.tune.space import Space, Value

PRESET = "preset"
"""Attribute of a trial: its index in `Space.presets()`. 0 is the checkpoint's own settings."""


@dataclass(frozen=True)
class Measured:
    """What the server did with some prompts, and how good its answers were."""

    scores: Sequence[float]
    """One score from 0 to 1 per prompt, in the order of the prompts."""
    tokens: int
    """Generated tokens, up to and including the end of each answer."""
    forwards: int
    """The number of forwards of canvases: denoise steps and commits."""
    seconds: float

    @property
    def accuracy(self) -> float:
        """The mean of the scores, from 0 to 1."""
        return sum(self.scores) / len(self.scores)

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens per forward. It is the same on every machine, unlike tokens per
        second."""
        return self.tokens / max(1, self.forwards)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of all concurrent prompts together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Tried:
    """A finished trial: its settings, and what they did on the prompts of the search."""

    number: int
    keys: Mapping[str, Value]
    """The `diffusion_*` keys that each request had."""
    measured: Measured
    is_own: bool  # whether the settings are the checkpoint's own

    @property
    def rule(self) -> Value:
        """The rule by which tokens become final: the value of the mode's key, else of the
        acceptance key."""
        return self.keys.get("diffusion_mode") or self.keys["diffusion_acceptance"]

    @classmethod
    def from_trial(cls, trial: FrozenTrial) -> "Tried":
        """Returns a finished trial of Optuna in our form."""
        attributes = trial.user_attrs
        measured = Measured(**attributes["measured"])
        return cls(trial.number, attributes["keys"], measured, is_own=attributes.get(PRESET) == 0)


def search(
    file: Path, space: Space, trials: int, measure: Callable[[Mapping[str, Value]], Measured]
) -> Iterator[Tried]:
    """Measures settings until `file` has `trials` of them, the presets first. Yields each trial,
    those of an earlier run in `file`, too. A preset that was stopped is measured again."""
    storage = JournalStorage(JournalFileBackend(str(file)))
    study = optuna.create_study(
        study_name="tune", storage=storage, directions=["maximize"] * 2, load_if_exists=True
    )
    for stopped in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(stopped.number, state=TrialState.FAIL)
    # A run that goes on must not draw what it drew before.
    study.sampler = TPESampler(seed=len(study.get_trials(deepcopy=False)))
    earlier = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    yield from map(Tried.from_trial, earlier)
    tried_presets = {trial.user_attrs.get(PRESET) for trial in earlier}
    presets = ((n, p) for n, p in enumerate(space.presets()) if n not in tried_presets)
    for _ in range(trials - len(earlier)):
        # One at a time: one that was stopped comes before those that wait.
        for number, parameters in islice(presets, 1):
            study.enqueue_trial(parameters, user_attrs={PRESET: number})
        trial = study.ask()
        keys = space.suggest(trial)
        measured = measure(keys)
        trial.set_user_attr("keys", keys)
        trial.set_user_attr("measured", asdict(measured))
        finished = study.tell(trial, [measured.accuracy, measured.tokens_per_forward])
        yield Tried.from_trial(finished)


def pareto_front(tried: list[Tried]) -> list[Tried]:
    """Returns the trials that no other trial beats in accuracy without being slower, or in speed
    without being less accurate. Of equal trials it takes the first. They are ordered by rising
    tokens per forward."""
    ordered = sorted(
        tried, key=lambda t: (-t.measured.tokens_per_forward, -t.measured.accuracy, t.number)
    )
    best: list[Tried] = []
    for candidate in ordered:
        if not best or candidate.measured.accuracy > best[-1].measured.accuracy:
            best.append(candidate)
    return best[::-1]
