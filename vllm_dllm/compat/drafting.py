"""Drafting: scheduler hooks, which speculator is used, and how scheduler and worker exchange draft
widths.

A draft width is the number of tokens to draft for a request after a step.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.compat.patching import wrap
from vllm_dllm.compat.scheduler import SchedulerHooks


class DraftSchedulerHooks(SchedulerHooks):
    """The hooks of a scheduler whose requests verify different numbers of drafts."""

    _just_started: frozenset[str] = frozenset()  # ids of requests that began with a step

    def verified_width(self, request: Request) -> int:
        """Hook. Returns how many tokens of `request`'s new draft are verified; here all."""
        return len(request.spec_token_ids)

    def drafts_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Hook. Called when the target has accepted `num_accepted` of `num_drafts` > 0 drafts."""

    def request_freed(self, request: Request) -> None:
        """Hook. Called when `request` has ended, before vLLM frees it."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        self._drop_drafts_beyond_width(draft_token_ids.req_ids)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        # A scheduler that runs ahead has just given each request its next drafts.
        self._drop_drafts_beyond_width(scheduler_output.num_scheduled_tokens)

    def _drop_drafts_beyond_width(self, request_ids: Iterable[str]) -> None:
        """Cuts the new drafts of requests, in place, to what `verified_width` returns."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.spec_token_ids:
                # A new list: requests may share theirs.
                request.spec_token_ids = request.spec_token_ids[: self.verified_width(request)]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Updates requests by a step's output. A request that begins with its last prompt token,
        because the rest is cached, may get placeholders in place of drafts: vLLM fills its rows up
        to those of others. They are always refused, and `drafts_verified` is not called for them.
        """
        began = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self._just_started = frozenset([*began, *resumed])
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """Calls `drafts_verified`, if the request had drafts, and returns vLLM's statistics."""
        num_drafts = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_drafts > 0 and request_id not in self._just_started:
            self.drafts_verified(request_id, num_drafts, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.request_freed(request)
        return super()._free_request(request, *args, **kwargs)


StockScheduler, StockAsyncScheduler = Scheduler, AsyncScheduler
_OTHER_DFLASH_ARCHITECTURES = {  # with speculators of their own
    "LiLiCorrDraftModel",
    "DFlash2DraftModel",
    "DFlash2BeamDraftModel",
    "Qwen3XPressModel",
    "DFlashQwen3XPressModel",
}


def has_dflash_method(speculative: SpeculativeConfig | None) -> TypeGuard[SpeculativeConfig]:
    """Whether vLLM's method "dflash" is configured, whatever the drafter is."""
    return speculative is not None and speculative.method == "dflash"


def is_dflash(speculative: SpeculativeConfig | None) -> bool:
    """Whether the drafter is a plain DFlash one, which our speculator serves."""
    return has_dflash_method(speculative) and not _OTHER_DFLASH_ARCHITECTURES & set(
        speculative.draft_model_config.architectures
    )


def is_dflash2(speculative: SpeculativeConfig | None) -> bool:
    """Whether the drafter is a DFlash2 one."""
    return (
        has_dflash_method(speculative)
        and "DFlash2DraftModel" in speculative.draft_model_config.architectures
    )


def set_speculator_classes(dflash: str, dflash2: str) -> None:
    """Makes model runners of this worker draft with the speculator class at path `dflash` or
    `dflash2` where a DFlash or DFlash2 drafter is served. Repeatable."""

    @wrap("v1.worker.gpu.model_runner:init_speculator")
    def init_speculator(
        stock: Any, vllm_config: VllmConfig, device: torch.device, req_states: Any
    ) -> Any:
        if is_dflash(vllm_config.speculative_config):
            return resolve_obj_by_qualname(dflash)(vllm_config, device, req_states)
        if is_dflash2(vllm_config.speculative_config):
            return resolve_obj_by_qualname(dflash2)(vllm_config, device)
        return stock(vllm_config, device, req_states)


def set_draft_widths(output: SchedulerOutput, widths: dict[str, int]) -> dict[str, int]:
    """Attaches the draft width of each request, by its id, to the step `output`. Changes it in
    place. vLLM itself has one width for all requests, which falls with the size of the batch under
    `num_speculative_tokens_per_batch_size`. Returns the widths, none larger than that one."""
    most = output.num_spec_tokens_to_schedule
    output.draft_widths = widths = {name: min(width, most) for name, width in widths.items()}
    output.num_spec_tokens_to_schedule = max(widths.values(), default=0)  # vLLM has one number
    output.skip_drafts = False  # vLLM 0.33 would skip drafting; a request's width says that here
    return widths


def set_placeholder_drafts(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Gives the requests of the step `output` placeholders for drafts of their widths, before the
    worker answers. Call it after `set_draft_widths`. The worker itself answers with such
    placeholders where no grammar has to see the tokens."""
    widths: dict[str, int] = output.draft_widths
    placeholders = [[-1] * width for width in widths.values()]
    scheduler.update_draft_token_ids(DraftTokenIds(list(widths), placeholders))


def predicted_widths(output: ModelRunnerOutput) -> Mapping[str, int]:
    """Returns the draft widths, by request id, that the speculator predicted, if any."""
    return getattr(output, "predicted_widths", {})


def send_widths_to_speculator(runner: Any, scheduler_output: SchedulerOutput) -> None:
    """Passes the draft widths attached to a step, if any, to the runner's speculator. Of the stages
    of pipeline parallelism, the last one has it."""
    widths = getattr(scheduler_output, "draft_widths", None)
    if widths is not None and runner.speculator is not None:
        runner.speculator.step_begins(scheduler_output, widths)


def send_predicted_widths(runner: Any, output: Any) -> Any:
    """Returns `output` of a worker's step, after attaching the predicted widths, if any."""
    take_widths = getattr(runner.speculator, "take_predicted_widths", None)
    if take_widths is not None and isinstance(output, AsyncModelRunnerOutput):
        output.model_runner_output.predicted_widths = take_widths()
    return output
