"""Each request's settings of how uniform canvases are denoised: the server's, or its own."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.config.denoise import DenoiseConfig
from vllm_dllm.config.extension import LoadStage
from vllm_dllm.denoise.step import StepRules
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.slots import NewRequest, Registry


class LoadStages:
    """The server's stages of load. The number of canvases in a step says which stages apply. The
    host knows this number, and it is the same on every rank."""

    def __init__(self, stages: Sequence[LoadStage], device: torch.device) -> None:
        self._starts = [stage.canvases for stage in stages]
        # [stages + 1] fp32, by how many stages apply; the first value changes no threshold.
        confidence = [0.0, *(stage.confidence_threshold for stage in stages)]
        stability = [torch.inf, *(float(stage.stability_threshold) for stage in stages)]
        self.confidence = torch.tensor(confidence, device=device)
        self.stability = torch.tensor(stability, device=device)

    def num_stages_at(self, num_canvases: int) -> int:
        """Returns how many stages apply to a step of `num_canvases` canvases; 0 if none does."""
        return bisect_right(self._starts, num_canvases)

    def loosen(
        self,
        rules: StepRules,
        allowed: torch.Tensor,  # [n] int64, how many stages each canvas' request allows
        reached: int,  # stages that apply to this step
    ) -> StepRules:
        """Returns the rules of n canvases with loosened thresholds, as tensors [n]. Each is the
        looser one of the canvas' own and that of the last stage that applies to its request."""
        stage = allowed.clamp(max=reached)
        return rules._replace(
            confidence_threshold=torch.maximum(
                torch.as_tensor(rules.confidence_threshold), self.confidence[stage]
            ),
            stability_threshold=torch.minimum(
                torch.as_tensor(rules.stability_threshold), self.stability[stage]
            ),
        )


_NEVER_LIKELY = 2.0  # a threshold that no probability reaches
_NONE_A_STEP = 0  # of `reveal_per_step`: only the threshold reveals positions


class Settings(NamedTuple):
    """The settings of a request as numbers, in the order of the device's table."""

    t_min: float
    t_span: float  # t_max - t_min
    entropy_bound: float  # nats
    confidence_threshold: float  # nats
    stability_threshold: float  # steps
    is_greedy: float  # 1 = candidates are the best guesses
    judges_answer_only: float  # 1 = only positions up to the first stop token are waited for
    load_stages: float  # how many of the server's load stages may apply
    reveals: float  # 1 = best guesses are revealed permanently, by the next two
    reveal_threshold: float  # probability
    reveal_per_step: float  # positions; -s: as many as reveal a canvas in s steps


class RevealSettings(NamedTuple):
    """How a step's n canvases reveal best guesses permanently; the fields are those of `Reveal`."""

    is_chosen: torch.Tensor  # [n] bool
    threshold: torch.Tensor  # [n] fp32
    per_step: torch.Tensor  # [n] int64


class StepSettings(NamedTuple):
    """The settings of a step's n canvases: numbers if all have the server's, else tensors [n]."""

    t_min: float | torch.Tensor
    t_span: float | torch.Tensor
    rules: StepRules
    is_greedy: torch.Tensor | None = None  # [n] bool; None: no canvas is
    judges_answer_only: torch.Tensor | None = None  # [n] bool; None: no canvas does
    reveal: RevealSettings | None = None  # None: no canvas reveals permanently


class SlotSettings(Registry):
    """The settings of every slot, in a table on the device. The host keeps those of slots that
    differ from the server's settings."""

    def __init__(
        self,
        config: DenoiseConfig,
        load: LoadStages,
        max_num_reqs: int,
        canvas_length: int,
        device: torch.device,
    ) -> None:
        """`config`, `load`: the server's settings, which requests may override."""
        self.load = load
        self.canvas_length, self.max_steps = canvas_length, config.max_denoising_steps
        # [slots, fields of `Settings`] fp32, of all requests
        self.table = torch.zeros(max_num_reqs, len(Settings._fields), device=device)
        columns = Settings(*self.table.unbind(dim=-1))
        self.schedule = columns.t_min, columns.t_span  # [slots] each, views
        self._added: dict[int, Settings] = {}
        self._default = Settings(
            t_min=config.t_min,
            t_span=config.t_max - config.t_min,
            entropy_bound=config.entropy_bound,
            confidence_threshold=config.confidence_threshold,
            stability_threshold=config.stability_threshold,
            is_greedy=0,
            judges_answer_only=0,
            load_stages=0,
            reveals=0,
            reveal_threshold=_NEVER_LIKELY,
            reveal_per_step=_NONE_A_STEP,
        )
        self._defaults_for_all = StepSettings(
            self._default.t_min,
            self._default.t_span,
            StepRules(
                config.entropy_bound, config.confidence_threshold, config.stability_threshold
            ),
        )
        self._own: dict[int, Settings] = {}  # of slots with settings of their own

    def add_request(self, request: NewRequest) -> None:
        """Stages the request's settings for `apply_staged_writes`."""
        temperature = request.params.temperature
        settings = self._read_settings(request.options, temperature, request.num_steps)
        self._added[request.slot] = settings
        if settings != self._default:
            self._own[request.slot] = settings

    def apply_staged_writes(self) -> None:
        """Writes the staged settings to the device's table, without waiting for the device."""
        write_rows_(self.table, self._added)
        self._added.clear()

    def remove_request(self, slot: int) -> None:
        self._added.pop(slot, None)
        self._own.pop(slot, None)

    def _read_settings(
        self, options: RequestOptions, temperature: float, num_steps: int
    ) -> Settings:
        """Returns a request's settings as numbers, the server's for those that it does not set."""
        default = self._default
        t_min, t_span = default.t_min, default.t_span
        if options.t_min is not None and options.t_max is not None:
            t_min, t_span = options.t_min, options.t_max - options.t_min
        is_greedy = temperature == 0.0
        # Greedy candidates need no temperature; what the entropies are taken at is the schedule's.
        factor = 1.0 if is_greedy else temperature
        threshold, per_step = _NEVER_LIKELY, _NONE_A_STEP
        if options.acceptance == "confidence":
            threshold, per_step = options.accept_probability, 1
        elif options.acceptance == "top_k":
            per_step = options.accept_tokens or -num_steps

        def own(value: float | None, otherwise: float) -> float:
            return otherwise if value is None else value

        return Settings(
            t_min=t_min * factor,
            t_span=t_span * factor,
            entropy_bound=own(options.entropy_bound, default.entropy_bound),
            confidence_threshold=own(options.confidence_threshold, default.confidence_threshold),
            stability_threshold=own(options.stability_threshold, default.stability_threshold),
            is_greedy=is_greedy,
            judges_answer_only=options.judges_answer_only,
            load_stages=options.load_stages,
            reveals=options.acceptance != "entropy_bound",
            reveal_threshold=threshold,
            reveal_per_step=per_step,
        )

    def reveals(self, batch: CanvasBatch) -> bool:
        """Returns whether any request of the batch reveals its best guesses permanently."""
        if not self._own:
            return False
        own = (self._own.get(slot) for slot in batch.slots_list)
        return any(settings is not None and settings.reveals for settings in own)

    def for_batch(self, batch: CanvasBatch) -> StepSettings:
        """Returns the settings of a step's canvases, with the thresholds of the load stages that
        apply. Settings that no request of the batch uses are None."""
        own = [self._own[slot] for slot in batch.slots_list if slot in self._own]
        if not own:
            return self._defaults_for_all
        columns = dict(
            zip(Settings._fields, self.table[batch.slot_index].unbind(dim=-1), strict=True)
        )
        rules = StepRules(
            columns["entropy_bound"],
            columns["confidence_threshold"],
            columns["stability_threshold"],
        )
        if reached := self.load.num_stages_at(len(batch.slots_np)):
            rules = self.load.loosen(rules, columns["load_stages"].long(), reached)
        found = StepSettings(columns["t_min"], columns["t_span"], rules)
        if any(settings.is_greedy for settings in own):
            found = found._replace(is_greedy=columns["is_greedy"] > 0)
        if any(settings.judges_answer_only for settings in own):
            found = found._replace(judges_answer_only=columns["judges_answer_only"] > 0)
        if any(settings.reveals for settings in own):
            per_step = columns["reveal_per_step"].long()
            num_steps = (-per_step).clamp(min=1)
            in_steps = (batch.lengths + num_steps - 1) // num_steps
            least = torch.where(per_step < 0, in_steps, per_step)
            reveal = RevealSettings(columns["reveals"] > 0, columns["reveal_threshold"], least)
            found = found._replace(reveal=reveal)
        return found


def write_rows_(
    table: torch.Tensor,  # [slots, k] fp32
    rows: Mapping[int, Sequence[float]],  # by slot, k values each
) -> None:
    """Overwrites rows of `table` in place, without waiting for the device."""
    slots = np.fromiter(rows, dtype=np.int64)
    values = np.array(list(rows.values()), dtype=np.float32)
    table[async_tensor_h2d(slots, device=table.device)] = async_tensor_h2d(
        values, device=table.device
    )
