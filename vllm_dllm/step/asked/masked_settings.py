"""Each request's settings of how a masked model's canvases are revealed."""

from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_dllm.denoise.masked import NO_BOUND, Edits, MaskedRules, even_share
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.asked.settings import write_rows_
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.slots import NewRequest, Registry

_NEVER = 2.0  # a threshold that no probability exceeds
_ALWAYS = -1.0  # a threshold that every probability exceeds
_EVEN_SHARE = 0  # of `least`: each step reveals an even share of the canvas
_ALL = torch.inf  # of `blocks_in_flight`


class _Settings(NamedTuple):
    """The settings of a request as numbers, in the order of the device's table."""

    temperature: float
    is_greedy: float  # 1 = candidates are the most probable tokens
    threshold: float  # probability
    least: float  # positions per step; _EVEN_SHARE: an even share of the canvas
    in_order: float  # 1 = the first positions are revealed, not the surest
    entropy_bound: float  # nats, or NO_BOUND
    edit_threshold: float  # probability; _NEVER: no revealed token changes
    edit_steps: float  # most steps that only change revealed tokens
    is_verified: float  # 1 = canvases are drafts, see `VerifiedStep`, `DraftingStep`
    blocks_in_flight: float  # blocks that are denoised together; _ALL: all of a canvas


_FLAGS = {"is_greedy", "in_order", "is_verified"}
_COUNTS = {"least", "edit_steps"}
_UNSET = {
    "in_order": 0,
    "entropy_bound": NO_BOUND,
    "edit_threshold": _NEVER,
    "is_verified": 0,
    "blocks_in_flight": _ALL,
}
"""Where all requests of a step have this value, `MaskedStepSettings` has None, not a tensor."""


class MaskedStepSettings(NamedTuple):
    """The settings of a step's n canvases, each [n]."""

    temperature: torch.Tensor  # fp32
    is_greedy: torch.Tensor  # bool
    threshold: torch.Tensor  # fp32
    least: torch.Tensor  # int64
    in_order: torch.Tensor | None  # bool; None: none is
    entropy_bound: torch.Tensor | None  # fp32; None: none has one
    edit_threshold: torch.Tensor | None  # fp32; None: none has one
    edit_steps: torch.Tensor  # int64
    has_shares: bool  # whether `least` is _EVEN_SHARE for any canvas
    is_verified: torch.Tensor | None  # bool; None: none is
    blocks_in_flight: torch.Tensor | None  # fp32; None: all of each canvas

    def rules(
        self,
        steps_done: torch.Tensor,  # [n] int64
        num_steps: torch.Tensor,  # [n] int64
        canvas_length: int | torch.Tensor,  # positions; [n] int64, or one number for all
    ) -> MaskedRules:
        """Returns the rules by which each canvas' next step chooses what candidates it reveals."""
        least = self.least
        if self.has_shares:
            share = even_share(steps_done, num_steps, canvas_length)
            least = torch.where(least == _EVEN_SHARE, share, least)
        return MaskedRules(self.threshold, least, self.in_order, self.entropy_bound)

    def edits(self, steps_done: torch.Tensor) -> Edits | None:
        """Returns which canvases may change revealed tokens, and when. Returns None if no canvas
        may. `steps_done`: [n] int64, consecutive steps of each canvas that found nothing hidden."""
        if self.edit_threshold is None:
            return None
        edits = self.edit_threshold < _NEVER
        return Edits(edits, self.edit_threshold, self.edit_steps, steps_done)


class MaskedSlotSettings(Registry):
    """The settings of every slot, on the host and in a table on the device."""

    def __init__(
        self,
        max_num_reqs: int,
        canvas_length: int,
        device: torch.device,
        *,
        reveals_at_threshold: bool,  # also candidates exactly as probable as the threshold
        may_reveal_none: bool = False,  # whether a step may reveal nothing
    ) -> None:
        self.max_steps = canvas_length  # with more, some would reveal nothing
        self._may_reveal_none = may_reveal_none
        self._reveals_at_threshold = reveals_at_threshold
        self._table = torch.zeros(max_num_reqs, len(_Settings._fields), device=device)
        self._by_slot: dict[int, _Settings] = {}
        self._are_verified = np.zeros(max_num_reqs, dtype=bool)
        self._added: set[int] = set()
        self._latest: tuple[list[int], MaskedStepSettings] | None = None  # slots, their settings

    def add_request(self, request: NewRequest) -> None:
        """Stages the request's settings for `apply_staged_writes`. An even share becomes one
        position a step if there are as many steps as positions. With `reveals_at_threshold`, the
        threshold becomes the next smaller fp32 number."""
        settings = _read_settings(request.options, request.params.temperature)
        is_one = request.num_steps == self.max_steps and not self._may_reveal_none
        if settings.least == _EVEN_SHARE and is_one:
            settings = settings._replace(least=1)
        if self._reveals_at_threshold:
            below = np.nextafter(np.float32(settings.threshold), np.float32(0.0))
            settings = settings._replace(threshold=float(below))
        self._by_slot[request.slot] = settings
        self._are_verified[request.slot] = settings.is_verified
        self._added.add(request.slot)

    def apply_staged_writes(self) -> None:
        """Writes the staged settings to the device's table, without waiting for the device."""
        write_rows_(self._table, {slot: self._by_slot[slot] for slot in self._added})
        self._added.clear()
        self._latest = None

    def remove_request(self, slot: int) -> None:
        self._by_slot.pop(slot, None)
        self._are_verified[slot] = False
        self._added.discard(slot)

    def are_scaled(self, batch: CanvasBatch) -> bool:
        """Returns whether temperature, top_k, top_p or min_p change any logits of the batch. At
        temperature 0 vLLM drops them all."""
        return any(not one.is_greedy for one in self._known_settings(batch.slots_list))

    def are_verified(self, slots_np: np.ndarray) -> np.ndarray:
        """Returns [n] bool: whether the drafts of the slots [n] are verified, see `VerifiedStep`
        and `DraftingStep`."""
        return self._are_verified[slots_np]

    def for_batch(self, batch: CanvasBatch) -> MaskedStepSettings:
        """Returns the settings of a step's canvases; the same object for the same slots."""
        slots = batch.slots_list
        if self._latest is None or self._latest[0] != slots:
            self._latest = slots, self._read_table(batch, self._known_settings(slots))
        return self._latest[1]

    def _known_settings(self, slots: list[int]) -> list[_Settings]:
        """Returns the settings of the slots' requests. A warm-up's slots have none: skips them."""
        return [self._by_slot[slot] for slot in slots if slot in self._by_slot]

    def _read_table(self, batch: CanvasBatch, of_requests: list[_Settings]) -> MaskedStepSettings:
        """Reads the settings of the batch's slots from the device's table, without waiting. The
        host's copies `of_requests` tell which columns no request uses; these are None."""
        table = self._table[batch.slot_index].clone()  # the rows may be another request's later on
        columns: dict[str, Any] = {
            name: _as_type(name, column)
            for name, column in zip(_Settings._fields, table.unbind(dim=-1), strict=True)
            if name not in _UNSET or any(getattr(one, name) != _UNSET[name] for one in of_requests)
        }
        has_shares = any(one.least == _EVEN_SHARE for one in of_requests)
        return MaskedStepSettings(**dict.fromkeys(_UNSET) | columns, has_shares=has_shares)


def _as_type(name: str, column: torch.Tensor) -> torch.Tensor:
    """Returns a column of the table in the dtype of its field."""
    if name in _FLAGS:
        return column > 0
    return column.long() if name in _COUNTS else column


def _read_settings(options: RequestOptions, temperature: float) -> _Settings:
    """Returns a request's settings as numbers. `temperature`: the request's; 0 is greedy."""
    rule = options.acceptance
    threshold, least, entropy_bound = _NEVER, options.accept_tokens or _EVEN_SHARE, NO_BOUND
    edit_threshold = _NEVER if options.edit_probability is None else options.edit_probability
    if options.is_verified:  # whatever the server's defaults say of steps
        threshold, least, edit_threshold = _ALWAYS, 1, _NEVER
    elif rule == "verified":
        edit_threshold = _NEVER
    elif rule == "confidence":
        threshold = options.accept_probability
    elif rule == "entropy_bound":
        assert options.entropy_bound is not None, "server_defaults has one"
        least, entropy_bound = 1, options.entropy_bound
    is_greedy = temperature == 0.0
    return _Settings(
        temperature=1.0 if is_greedy else temperature,
        is_greedy=is_greedy,
        threshold=threshold,
        least=least,
        in_order=rule == "in_order" and not options.is_verified,
        entropy_bound=entropy_bound,
        edit_threshold=edit_threshold,
        edit_steps=options.edit_steps,
        is_verified=options.is_verified or rule == "verified",
        blocks_in_flight=options.blocks_in_flight or _ALL,
    )
