"""vLLM's schedulers with a draft width for each request.

The scheduler chooses the widths, because it knows the batch, how many drafts were accepted, and how
long each request is. It sends them to the worker with each step. Drafts beyond a request's width
are not verified.
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


class _DraftWidthMixin(drafting.DraftSchedulerHooks):
    """The part of both schedulers that chooses draft widths. Methods without an underscore
    implement the hooks of `DraftSchedulerHooks`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Reads the settings `drafter`, and starts the thread of the buffer if there is one. Ends
        the engine's process when its parent ends. The arguments are vLLM's."""
        end_with_parent()  # this is the engine's process
        super().__init__(*args, **kwargs)
        config = ExtensionConfig.from_additional_config(self.vllm_config.additional_config).drafter
        self._policy = make_policy(config, self.num_spec_tokens)
        self._max_context = context_limit(
            config, self.vllm_config.speculative_config, self.max_model_len
        )
        self._buffer: BlockBuffer | None = None
        if config.buffer is not None:
            self._buffer = BlockBuffer(
                Path(config.buffer), config.buffer_mib << 20, config.buffer_every
            )
        self._clock = StepClock()
        self._just_verified: str | None = None
        self._draft_widths: dict[str, int] = {}  # request id -> width sent with its last step
        logger.info(
            "Verifying at most %d of %d drafted tokens per request (width policy: %s), for "
            "requests of up to %d tokens (drafter.max_context).",
            self._policy.widest,
            self.num_spec_tokens,
            config.width_policy,
            self._max_context,
        )

    def max_useful_width(self, request: Request) -> int:
        """Returns how many drafted tokens `request` can use, 0 beyond `drafter.max_context`. The
        target adds one token of its own to the drafts that it accepts."""
        if request.num_tokens > self._max_context:
            return 0
        return max(request.max_tokens - request.num_output_tokens - 1, 0)

    def draft_width(self, request: Request) -> int:
        """Returns how many tokens to draft next for `request`."""
        width = self._policy.width(request.request_id, len(self.running))
        return min(width, self.max_useful_width(request))

    def verified_width(self, request: Request) -> int:
        """Returns how many drafts of `request` the next step verifies. These are no more than were
        drafted, even if the policy has chosen a wider width since then."""
        return min(self._draft_widths.get(request.request_id, 0), self.draft_width(request))

    def complete_output(self, output: SchedulerOutput) -> None:
        """Adds to `output` each request's tokens to draft after the step; 0 during a prefill."""
        scheduled = output.num_scheduled_tokens
        requests = {request_id: self.requests[request_id] for request_id in scheduled}
        could_draft = [
            request_id
            for request_id, request in requests.items()
            if request.num_computed_tokens + scheduled[request_id] >= request.num_tokens
            and self.max_useful_width(request) > 0
        ]
        self._policy.step_scheduled(could_draft, len(requests))
        widths = dict.fromkeys(requests, 0)
        widths |= {request_id: self.draft_width(requests[request_id]) for request_id in could_draft}
        widths = drafting.set_draft_widths(output, widths)
        self._draft_widths |= widths
        self._clock.step_scheduled(describe_step(output, widths), scheduled)

    def drafts_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Tells the policy how many drafts the target has accepted."""
        self._policy.draft_verified(request_id, num_drafts, num_accepted)
        self._just_verified = request_id

    def block_emitted(self, request: Request, block_length: int) -> None:
        """Adds the emitted tokens to the buffer if they come from a verification, right after
        `drafts_verified` of the same request. Leaves out requests of which the target has read more
        than their tokens: training knows only these."""
        is_verified = self._just_verified == request.request_id
        if self._buffer is not None and is_verified and has_only_tokens(request):
            anchor = request.num_tokens - block_length - 1
            self._buffer.add_block(request.all_token_ids, anchor, block_length - 1)
        self._just_verified = None

    def request_stopped(self, request: Request, block_length: int, num_kept: int) -> None:
        """Adds the tokens that an ended request keeps of its last block to the buffer."""
        if num_kept > 0:
            self.block_emitted(request, num_kept)

    def shutdown(self) -> None:
        """Writes the rest of the buffer, and shuts down vLLM's scheduler."""
        if self._buffer is not None:
            self._buffer.close()
        super().shutdown()

    def output_arrived(self, output: ModelRunnerOutput) -> None:
        """Tells the policy which widths the worker has predicted, and how long the step took."""
        for request_id, width in drafting.predicted_widths(output).items():
            if request_id in self.requests:
                self._policy.width_predicted(request_id, width)
        if (timed := self._clock.step_answered()) is not None:
            self._policy.step_timed(*timed)

    def request_freed(self, request: Request) -> None:
        """Forgets an ended request."""
        self._draft_widths.pop(request.request_id, None)
        self._policy.request_ended(request.request_id)


def has_only_tokens(request: Request) -> bool:
    """Returns whether what the target reads of `request` follows from its tokens and the target's
    own weights: it has no embeddings, images or LoRA adapter."""
    beside = (request.prompt_embeds, request.lora_request)
    return not request.mm_features and all(each is None for each in beside)


def describe_step(output: SchedulerOutput, widths: Mapping[str, int]) -> Step:
    """Returns the size of the step that `output` schedules, with drafts of `widths` tokens."""
    drafts = output.scheduled_spec_decode_tokens
    num_rows = num_prefilled = 0
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        if num_tokens == 1 + len(drafts.get(request_id, ())):
            num_rows += num_tokens
        else:
            num_prefilled += num_tokens
    return Step(num_rows, num_prefilled, sum(width > 0 for width in widths.values()))


class DraftWidthScheduler(_DraftWidthMixin, drafting.StockScheduler):
    """The scheduler without asynchronous scheduling. It spares the engine a round trip to the
    worker after each step, since it knows how many tokens are drafted. Only a grammar needs to know
    which tokens these are."""

    _knows_drafts = False

    @property
    def knows_draft_tokens(self) -> bool:
        """Whether the engine may go on without asking the worker for the drafted tokens."""
        return self._knows_drafts

    def output_processed(self, output: SchedulerOutput) -> None:
        """Gives requests placeholders for their drafts, unless a grammar needs the tokens."""
        self._knows_drafts = not output.has_structured_output_requests
        if self._knows_drafts:
            drafting.set_placeholder_drafts(self, output)


class DraftWidthAsyncScheduler(_DraftWidthMixin, drafting.StockAsyncScheduler):
    """The scheduler with asynchronous scheduling."""


def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> _DraftWidthMixin:
    """Returns the scheduler of a target with a DFlash drafter, with or without asynchronous
    scheduling. vLLM calls it as its `scheduler_cls`."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_cls = DraftWidthAsyncScheduler if is_async else DraftWidthScheduler
    return scheduler_cls(vllm_config, *args, **kwargs)
