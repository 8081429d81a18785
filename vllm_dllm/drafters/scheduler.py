"""vLLM's schedulers with a draft width for each request.

The scheduler decides, because it knows the batch, what was accepted and how long each request is.
Drafts beyond a request's width are not scheduled. With each step, the worker is told how many
tokens to draft for each request.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.compat import drafting
from vllm_dllm.config.drafter import context_limit
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.drafters.buffer import BlockBuffer
from vllm_dllm.drafters.step_costs import Step, StepClock
from vllm_dllm.drafters.width import make_policy
from vllm_dllm.parents import end_with_parent

logger = init_logger(__name__)


class _DraftWidths(drafting.DraftSchedulerHooks):
    def __init__(self, *args: object, **kwargs: object) -> None:
        end_with_parent()  # this is the engine's process
        super().__init__(*args, **kwargs)
        config = ExtensionConfig.from_additional_config(self.vllm_config.additional_config).drafter
        self._policy = make_policy(config, self.num_spec_tokens)
        self._max_context = context_limit(
            config, self.vllm_config.speculative_config.draft_model_config, self.max_model_len
        )
        self._buffer: BlockBuffer | None = None
        if config.buffer is not None:
            self._buffer = BlockBuffer(
                Path(config.buffer), config.buffer_mib << 20, config.buffer_every
            )
        self._clock = StepClock()
        self._just_verified: str | None = None
        self._asked: dict[str, int] = {}  # tokens to draft after a request's last scheduled step
        logger.info(
            "Verifying at most %d of %d drafted tokens per request (width policy: %s), for "
            "requests of up to %d tokens (drafter.max_context).",
            self._policy.widest,
            self.num_spec_tokens,
            config.width_policy,
            self._max_context,
        )

    def room(self, request: Request) -> int:
        """How many drafts `request` can use: the target adds one token of its own to those it
        accepts."""
        if request.num_tokens > self._max_context:
            return 0
        return max(request.max_tokens - request.num_output_tokens - 1, 0)

    def draft_width(self, request: Request) -> int:
        """The width of the next draft of `request`."""
        width = self._policy.width(request.request_id, len(self.running))
        return min(width, self.room(request))

    def verified_width(self, request: Request) -> int:
        # No more than was asked for, even if the policy has changed its mind.
        return min(self._asked.get(request.request_id, 0), self.draft_width(request))

    def complete_output(self, output: SchedulerOutput) -> None:
        """Sets how many tokens are drafted after this step: none during a prefill."""
        scheduled = output.num_scheduled_tokens
        requests = {request_id: self.requests[request_id] for request_id in scheduled}
        could_draft = [
            request_id
            for request_id, request in requests.items()
            if request.num_computed_tokens + scheduled[request_id] >= request.num_tokens
            and self.room(request) > 0
        ]
        self._policy.step_scheduled(could_draft, len(requests))
        widths = dict.fromkeys(requests, 0)
        widths |= {request_id: self.draft_width(requests[request_id]) for request_id in could_draft}
        self._asked |= widths
        drafting.set_draft_widths(output, widths)
        self._clock.scheduled(step_of(output, widths), scheduled)

    def drafts_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        self._policy.verified(request_id, num_drafts, num_accepted)
        self._just_verified = request_id

    def block_emitted(self, request: Request, block_length: int) -> None:
        # The tokens of a verification arrive right after their number.
        if self._buffer is not None and self._just_verified == request.request_id:
            anchor = request.num_tokens - block_length - 1
            self._buffer.add(request.all_token_ids, anchor, block_length - 1)
        self._just_verified = None

    def request_stopped(self, request: Request, block_length: int, num_kept: int) -> None:
        if num_kept > 0:
            self.block_emitted(request, num_kept)

    def shutdown(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        super().shutdown()

    def output_arrived(self, output: ModelRunnerOutput) -> None:
        for request_id, width in drafting.predicted_widths(output).items():
            if request_id in self.requests:
                self._policy.predicted(request_id, width)
        if (ended := self._clock.arrived()) is not None:
            self._policy.step_timed(*ended)

    def request_freed(self, request: Request) -> None:
        self._asked.pop(request.request_id, None)
        self._policy.ended(request.request_id)


def step_of(output: SchedulerOutput, widths: Mapping[str, int]) -> Step:
    """The step that `output` schedules, followed by drafts of `widths`."""
    drafts = output.scheduled_spec_decode_tokens
    num_rows = num_prefilled = 0
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        if num_tokens == 1 + len(drafts.get(request_id, ())):
            num_rows += num_tokens
        else:
            num_prefilled += num_tokens
    return Step(num_rows, num_prefilled, sum(width > 0 for width in widths.values()))


class DraftWidthScheduler(_DraftWidths, drafting.StockScheduler):
    """Saves the engine a round trip to the worker after each step: it knows how many tokens are
    drafted, and only the worker needs to know which, unless a grammar constrains them."""

    _knows_drafts = False

    @property
    def knows_draft_tokens(self) -> bool:
        return self._knows_drafts

    def output_processed(self, output: SchedulerOutput) -> None:
        self._knows_drafts = not output.has_structured_output_requests
        if self._knows_drafts:
            drafting.set_placeholder_drafts(self, output)


class DraftWidthAsyncScheduler(_DraftWidths, drafting.StockAsyncScheduler):
    pass


def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> _DraftWidths:
    """The `scheduler_cls` of targets with a DFlash drafter."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_cls = DraftWidthAsyncScheduler if is_async else DraftWidthScheduler
    return scheduler_cls(vllm_config, *args, **kwargs)
