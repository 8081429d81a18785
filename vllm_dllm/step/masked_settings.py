"""How the canvases of a masked model's requests are revealed: each request's own settings."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_dllm.denoise.masked import NO_BOUND, Edits, MaskedRules, even_share
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.registry import NewRequest
from vllm_dllm.step.settings import write_rows_

_NEVER = 2.0  # a threshold that no probability exceeds
_EVEN_SHARE = 0


class _Settings(NamedTuple):
    """Of a request, in the order of the device's table."""

    temperature: float
    is_greedy: float  # 1 = the candidates are the most probable tokens
    threshold: float  # probability
    least: float  # positions per step; _EVEN_SHARE: as the number of steps asks for
    in_order: float  # 1 = those are the first ones
    entropy_bound: float  # nats, or NO_BOUND
    edit_threshold: float  # probability; _NEVER: no revealed token changes
    edit_steps: float  # most steps that only change


class MaskedStepSettings(NamedTuple):
    """Of the n canvases of a step, each [n]."""

    temperature: torch.Tensor  # fp32
    is_greedy: torch.Tensor  # bool
    threshold: torch.Tensor  # fp32
    least: torch.Tensor  # int64
    in_order: torch.Tensor  # bool
    entropy_bound: torch.Tensor  # fp32
    edit_threshold: torch.Tensor  # fp32
    edit_steps: torch.Tensor  # int64

    def rules(
        self,
        steps_done: torch.Tensor,  # [n] int64
        num_steps: torch.Tensor,  # [n] int64
        canvas_length: int,
    ) -> MaskedRules:
        share = even_share(steps_done, num_steps, canvas_length)
        least = torch.where(self.least == _EVEN_SHARE, share, self.least)
        return MaskedRules(self.threshold, least, self.in_order, self.entropy_bound)

    def edits(self, steps_done: torch.Tensor) -> Edits:
        edits = self.edit_threshold < _NEVER
        return Edits(edits, self.edit_threshold, self.edit_steps, steps_done)


class MaskedSlotSettings:
    """Of every slot."""

    def __init__(
        self,
        max_num_reqs: int,
        canvas_length: int,
        device: torch.device,
        *,
        reveals_at_threshold: bool,  # also what is exactly as probable, not only what is more
    ) -> None:
        self.max_steps = canvas_length  # more would reveal nothing in some
        self._reveals_at_threshold = reveals_at_threshold
        self._table = torch.zeros(max_num_reqs, len(_Settings._fields), device=device)
        self._added: dict[int, _Settings] = {}
        self._scaled: set[int] = set()
        self._edited: set[int] = set()

    def add(self, request: NewRequest) -> None:
        settings = _settings(request.options, request.params.temperature)
        if self._reveals_at_threshold:
            below = np.nextafter(np.float32(settings.threshold), np.float32(0.0))
            settings = settings._replace(threshold=float(below))
        self._added[request.slot] = settings
        if not settings.is_greedy:
            self._scaled.add(request.slot)
        if settings.edit_threshold < _NEVER:
            self._edited.add(request.slot)

    def start(self) -> None:
        write_rows_(self._table, self._added)
        self._added.clear()

    def drop(self, slot: int) -> None:
        self._added.pop(slot, None)
        self._scaled.discard(slot)
        self._edited.discard(slot)

    def are_scaled(self, batch: CanvasBatch) -> bool:
        """Whether a temperature changes any of the logits, or top_k, top_p or min_p, which vLLM
        drops at temperature 0."""
        return not self._scaled.isdisjoint(batch.slots_np.tolist())

    def are_edited(self, batch: CanvasBatch) -> bool:
        """Whether any of these canvases may change what it has revealed."""
        return not self._edited.isdisjoint(batch.slots_np.tolist())

    def of(self, batch: CanvasBatch) -> MaskedStepSettings:
        columns = self._table[batch.slot_index].unbind(dim=-1)
        found = dict(zip(_Settings._fields, columns, strict=True))
        return MaskedStepSettings(
            temperature=found["temperature"],
            is_greedy=found["is_greedy"] > 0,
            threshold=found["threshold"],
            least=found["least"].long(),
            in_order=found["in_order"] > 0,
            entropy_bound=found["entropy_bound"],
            edit_threshold=found["edit_threshold"],
            edit_steps=found["edit_steps"].long(),
        )


def _settings(options: RequestOptions, temperature: float) -> _Settings:
    rule = options.acceptance
    threshold, least, entropy_bound = _NEVER, options.accept_tokens or _EVEN_SHARE, NO_BOUND
    if rule == "confidence":
        threshold = options.accept_probability
    elif rule == "entropy_bound":
        assert options.entropy_bound is not None, "requests.masked has a default"
        least, entropy_bound = 1, options.entropy_bound
    is_greedy = temperature == 0.0
    return _Settings(
        temperature=1.0 if is_greedy else temperature,
        is_greedy=is_greedy,
        threshold=threshold,
        least=least,
        in_order=rule == "in_order",
        entropy_bound=entropy_bound,
        edit_threshold=_NEVER if options.edit_probability is None else options.edit_probability,
        edit_steps=options.edit_steps,
    )
