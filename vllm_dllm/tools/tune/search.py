"""The search itself: the settings that are tried, `diffusion_*` keys of a request and the ranges of
their values; trials of them, which are kept in a file; and the choice of the best trials."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from vllm_dllm.config.architectures import LLADA22, family_of, takes_acceptance
from vllm_dllm.config.denoise import DenoiseConfig
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import read_json
from vllm_dllm.requests.options import MASKED_ENTROPY_BOUND

Value = str | int | float
_MOST_TOKENS = 32  # the most accepted tokens of a step that are tried, for `top_k`
_IN_FLIGHT = "diffusion_blocks_in_flight"
_CHOICES = ("entropy_bound", "confidence", "top_k")
BLOCKS_IN_FLIGHT = 4
"""The most blocks in flight that are tried. The server of the trials has this number."""
_PUBLISHED: Mapping[str, Sequence[Mapping[str, Value]]] = {
    "SDARForCausalLM": [{"acceptance": "top_k", "accept_tokens": 1}],
    "SDARMoeForCausalLM": [{"acceptance": "top_k", "accept_tokens": 1}],
    "LLaDA2MoeModelLM": [
        {"accept_probability": 0.7, "edits": 1, "edit_probability": 0.5},
        {"accept_probability": 0.5, "edits": 1, "edit_probability": 0.0},
    ],
    "NemotronLabsDiffusionModel": [{"mode": "self_speculation"}],
    "Fast_dLLM_QwenForCausalLM": [{"accept_probability": 0.9}],
}
"""Architecture -> what a family's authors recommend beside the checkpoint's own settings, as
changes to these: SDAR's loop of fixed counts, LLaDA2.1's quality and speed modes, Nemotron's
verified drafts, and the threshold of Fast-dLLM v2's demonstrations."""


class Space:
    """The values that are tried. They lie around what a checkpoint's own files say."""

    def __init__(self, checkpoint: Path, serve_options: Sequence[str] = ()) -> None:
        """Reads config.json and generation_config.json in the folder `checkpoint`. If the user's
        `serve_options` have an `--additional-config` or `--config`, blocks in flight stay as these
        say, and are not searched.

        Raises:
            InputError: the checkpoint is not a diffusion model, or a file lacks a value.
        """
        config = read_json(checkpoint / "config.json")
        names = config.get("architectures") or [""]
        self._family = family_of(names[0], SimpleNamespace(**config))
        self._published = () if self._family is LLADA22 else _PUBLISHED.get(names[0], ())
        self._has_edits = names[0] == "LLaDA2MoeModelLM" and self._family is not LLADA22
        is_open = not any(
            option.startswith(("--additional-config", "--config")) for option in serve_options
        )
        self._has_blocks_in_flight = (
            self._family is not None and self._family.allows_blocks_in_flight and is_open
        )
        self._config: DenoiseConfig | None = None  # of a model that is not a masked one
        if self._family is None:
            own = read_json(checkpoint / "generation_config.json")
            try:
                self._config = DenoiseConfig.from_generation_config(own)
            except ValueError as error:
                raise InputError(
                    f"'{checkpoint}' has no settings of a diffusion model to start from: {error}"
                ) from error

    @property
    def server_settings(self) -> dict[str, Any]:
        """The extension's settings of the server on which all trials run."""
        return {"blocks_in_flight": BLOCKS_IN_FLIGHT} if self._has_blocks_in_flight else {}

    def settings_for(self, keys: Mapping[str, Value]) -> dict[str, Any]:
        """Returns the extension's settings of a server that answers every request as the server of
        the trials answered requests with `keys`."""
        defaults = dict(keys)
        if keys.get("diffusion_acceptance") == "verified" and self._has_blocks_in_flight:
            return {"blocks_in_flight": 2, "defaults": defaults}  # room for a second copy
        # Edits go on until all blocks of a canvas are finished, so they need the same canvas.
        if keys.get(_IN_FLIGHT, 1) == 1 and "diffusion_edit_probability" not in keys:
            defaults.pop(_IN_FLIGHT, None)
            return {"defaults": defaults}
        return self.server_settings | {"defaults": defaults}

    @property
    def _has_verified(self) -> bool:
        """Whether drafts can be verified on the server of the trials."""
        in_flight = self.server_settings.get("blocks_in_flight", 1)
        return takes_acceptance(self._family, "verified", in_flight)

    def presets(self) -> list[dict[str, Value]]:
        """Returns the parameters of the first trials: the checkpoint's own settings, those that the
        family's authors recommend, verified drafts, and the checkpoint's own with
        `BLOCKS_IN_FLIGHT` blocks in flight."""
        own = self.own()
        presets = [own, *(own | dict(change) for change in self._published)]
        if self._has_verified:
            presets.append(own | {"acceptance": "verified"})
        if self._has_blocks_in_flight:
            presets.append(own | {"blocks_in_flight": BLOCKS_IN_FLIGHT})
        return presets

    def own(self) -> dict[str, Value]:
        """Returns the parameters of the trial with the checkpoint's own settings."""
        if (config := self._config) is None:
            assert self._family is not None
            own: dict[str, Value] = {"mode": "diffusion"} if self._family.is_causal else {}
            own |= {"acceptance": "confidence", "accept_probability": self._family.threshold}
            if self._has_edits:
                own["edits"] = 0
            if self._has_blocks_in_flight:
                own["blocks_in_flight"] = 1
            return own
        return {
            "acceptance": "entropy_bound",
            "entropy_bound": config.entropy_bound,
            "max_steps": config.max_denoising_steps,
            "t_max": config.t_max,
            "t_min_share": config.t_min / config.t_max,
            "confidence_threshold": config.confidence_threshold,
            "stability_threshold": config.stability_threshold,
            "judge_answer_only": 0,
        }

    def suggest(self, trial: optuna.trial.BaseTrial) -> dict[str, Value]:
        """Returns the keys of one trial, with values that Optuna chooses."""
        if self._family is not None and self._family.is_causal:  # can decode token by token, too
            mode = trial.suggest_categorical("mode", ("diffusion", "self_speculation"))
            if mode != "diffusion":
                return {"diffusion_mode": mode}
        keys = self._suggest_acceptance(trial)
        return keys if self._config is None else keys | _suggest_finish(trial, self._config)

    def _suggest_acceptance(self, trial: optuna.trial.BaseTrial) -> dict[str, Value]:
        """Returns the key of an acceptance rule and those of the rule's own parameters, which
        verified drafts do not have."""
        choices = (*_CHOICES, "verified") if self._has_verified else _CHOICES
        rule = trial.suggest_categorical("acceptance", choices)
        keys: dict[str, Value] = {"diffusion_acceptance": rule}
        bound = MASKED_ENTROPY_BOUND if self._config is None else self._config.entropy_bound
        if rule == "entropy_bound":
            keys["diffusion_entropy_bound"] = _suggest_around(
                trial, "entropy_bound", bound, 0.1, 30
            )
        elif rule == "confidence":
            probability = trial.suggest_float("accept_probability", 0.5, 1.0)
            keys["diffusion_accept_probability"] = probability
            if self._has_edits and trial.suggest_categorical("edits", (0, 1)):
                edit_probability = trial.suggest_float("edit_probability", 0, 0.95)
                keys["diffusion_edit_probability"] = edit_probability
            if self._has_blocks_in_flight:
                keys[_IN_FLIGHT] = trial.suggest_int(
                    "blocks_in_flight", 1, BLOCKS_IN_FLIGHT, log=True
                )
        elif rule == "top_k":
            tokens = trial.suggest_int("accept_tokens", 1, _MOST_TOKENS, log=True)
            keys["diffusion_accept_tokens"] = tokens
        return keys


def _suggest_finish(trial: optuna.trial.BaseTrial, config: DenoiseConfig) -> dict[str, Value]:
    """Returns the keys that masked models lack: temperatures, and what decides when a canvas is
    finished. Values lie around the checkpoint's own, `config`."""
    t_max = trial.suggest_float("t_max", 0.25 * config.t_max, 2 * config.t_max)
    share = trial.suggest_float("t_min_share", 0.1, 1)
    most_steps = config.max_denoising_steps
    return {
        "diffusion_max_steps": trial.suggest_int(
            "max_steps", min(2, most_steps), most_steps, log=True
        ),
        "diffusion_t_max": t_max,
        "diffusion_t_min": share * t_max,
        "diffusion_confidence_threshold": _suggest_around(
            trial, "confidence_threshold", config.confidence_threshold, 0.1, 100
        ),
        "diffusion_stability_threshold": trial.suggest_int(
            "stability_threshold", 0, max(2, config.stability_threshold)
        ),
        "diffusion_judge_answer_only": trial.suggest_categorical("judge_answer_only", (0, 1)),
    }


def _suggest_around(
    trial: optuna.trial.BaseTrial, name: str, own: float, least: float, most: float
) -> float:
    """Returns a value between `least` and `most` times the checkpoint's own, on a logarithmic
    scale."""
    return trial.suggest_float(name, least * own, most * own, log=True)


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
