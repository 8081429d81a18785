"""vLLM's schedulers with a width of drafts for each request.

The scheduler decides: it knows the batch, what was accepted and how long each request is. Drafts
beyond a request's width are not scheduled; the worker hears, with each step, how many tokens to
draft for each request.
"""

from pathlib import Path

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.compat import drafting
from vllm_dllm.config import ExtensionConfig
from vllm_dllm.drafters.buffer import BlockBuffer
from vllm_dllm.drafters.width import make_policy

logger = init_logger(__name__)


class _DraftWidths(drafting.DraftSchedulerHooks):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        config = ExtensionConfig.from_additional_config(self.vllm_config.additional_config).drafter
        self._policy = make_policy(config, self.num_spec_tokens)
        self._max_context = config.max_context or self.max_model_len
        self._buffer: BlockBuffer | None = None
        if config.buffer is not None:
            self._buffer = BlockBuffer(
                Path(config.buffer), config.buffer_mib << 20, config.buffer_every
            )
        self._just_verified: str | None = None
        self._asked: dict[str, int] = {}  # tokens to draft after the last scheduled step
        logger.info(
            "Verifying at most %d of %d drafted tokens a request (width policy: %s).",
            self._policy.widest,
            self.num_spec_tokens,
            config.width_policy,
        )

    def draft_width(self, request: Request) -> int:
        """For the next draft of `request`."""
        if request.num_tokens > self._max_context:
            return 0
        # The target adds a token of its own to what it accepts.
        room = request.max_tokens - request.num_output_tokens - 1
        return min(self._policy.width(request.request_id, len(self.running)), max(room, 0))

    def verified_width(self, request: Request) -> int:
        # No more than was asked for, though the policy may think better of it by now.
        return min(self._asked.get(request.request_id, 0), self.draft_width(request))

    def complete_output(self, output: SchedulerOutput) -> None:
        """What is drafted after this step, for the next: nothing while a prefill goes on."""
        self._policy.step_scheduled()
        self._asked = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            prefills_on = request.num_computed_tokens + num_tokens < request.num_tokens
            self._asked[request_id] = 0 if prefills_on else self.draft_width(request)
        drafting.set_draft_widths(output, self._asked)

    def drafts_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        self._policy.verified(request_id, num_drafts, num_accepted)
        self._just_verified = request_id

    def block_emitted(self, request: Request, block_length: int) -> None:
        # The tokens of a verification arrive right after its count.
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

    def request_freed(self, request: Request) -> None:
        self._policy.ended(request.request_id)


class DraftWidthScheduler(_DraftWidths, drafting.StockScheduler):
    pass


class DraftWidthAsyncScheduler(_DraftWidths, drafting.StockAsyncScheduler):
    pass
