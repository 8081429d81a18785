"""vLLM's scheduler, with some of its steps open to subclasses."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched import diffusion_scheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_dllm.compat import version
from vllm_dllm.compat.patching import replace


class SchedulerHooks(Scheduler):
    """vLLM's scheduler, with some of its steps open to subclasses."""

    _worker_masks = True  # the worker gets the masks of grammars

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ask_for_draft_tokens_only_if_needed()
        self.kv_cache_manager = _WholePrefixes(
            self.kv_cache_manager,  # type: ignore[has-type]
            self.prefill_end,
        )

    def check_blocks_by(self, make_check: Callable[[Any], Any]) -> None:
        """What is emitted is checked by `make_check` of vLLM's `StructuredOutputManager`, and no
        masks are made for the worker."""
        before = self.structured_output_manager  # type: ignore[has-type]
        self.structured_output_manager = make_check(before)
        self._worker_masks = False

    @property
    def knows_draft_tokens(self) -> bool:
        """Whether the engine may save itself the question what the step just run has drafted."""
        return False

    def sitting_out(self) -> Sequence[Request]:
        """Running requests that have no part in the step that is about to be scheduled."""
        return ()

    def held_back(self) -> Sequence[Request]:
        """Waiting requests that may not run from the step on that is about to be scheduled."""
        return ()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self.sitting_out():
            earliest = self.current_step + 2  # the step to be is the next one
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, earliest)
        if held := self.held_back():
            self.waiting.remove_requests(held)
        output = super().schedule(*args, **kwargs)
        for request in held:
            self.waiting.add_request(request)
        if not self._worker_masks:
            # vLLM would wait for the tokens of the step before, and make masks of the drafts. Here
            # and not earlier: its asynchronous scheduler asks for that last of all.
            output.has_structured_output_requests = False
            output.pending_structured_output_tokens = False
        return output

    def complete_output(self, output: SchedulerOutput) -> None:
        """May change what a step schedules, before it is counted."""

    def output_counted(self, output: SchedulerOutput) -> None:
        """The step `output` is on its way, and the requests' counters have moved on."""

    def block_emitted(self, request: Request, block_length: int) -> None:
        """`request` has just got a block of `block_length` tokens, and goes on."""

    def request_stopped(self, request: Request, block_length: int, num_kept: int) -> None:
        """`request` has just ended with a block of `block_length` tokens, the first `num_kept` of
        which are its own. Its cache blocks are still there, unless it was preempted meanwhile
        and has no computed tokens."""

    def is_cut(self, request: Request) -> bool:
        """Whether the token that `request` has just stopped at only closes it, for lack of others:
        then the client does not see it."""
        return False

    def output_arrived(self, output: ModelRunnerOutput) -> None:
        """The worker's answer, before anything is made of it."""

    def output_processed(self, output: SchedulerOutput) -> None:
        """The requests have what the step `output` gave them."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self.output_arrived(model_runner_output)
        found = super().update_from_output(scheduler_output, model_runner_output)
        self.output_processed(scheduler_output)
        return found

    def prefill_end(self, request: Request, end: int) -> int:
        """Returns the position where a part of `request`'s prompt ends that may go to `end`."""
        return end

    def take_new_blocks_to_zero(self) -> list[int]:
        """Cache blocks handed out since the last call that must be zeroed before use."""
        return self._get_new_block_ids_to_zero() or []

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        end = self.prefill_end(request, num_computed_tokens + num_new_tokens)
        num_new_tokens = max(0, end - num_computed_tokens)
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kwargs
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        scheduler_output.scheduled_at = time.monotonic()
        self.complete_output(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        self.output_counted(scheduler_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        block_length = len(new_token_ids)
        kept, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if stopped:
            self.request_stopped(request, block_length, len(kept))
            if request.status == RequestStatus.FINISHED_STOPPED and self.is_cut(request):
                request.status, request.stop_reason = RequestStatus.FINISHED_LENGTH_CAPPED, None
                kept = kept[:-1]
        else:
            self.block_emitted(request, block_length)
        return kept, stopped


def ask_for_draft_tokens_only_if_needed() -> None:
    """This process' engine no longer asks its worker for draft tokens after each step, a round trip
    between processes (0.7 ms of 15 on two cores), where its scheduler knows them. Repeatable."""

    def make(stock: Any) -> Any:
        def post_step(self: Any, model_executed: bool) -> None:
            if not getattr(self.scheduler, "knows_draft_tokens", False):
                stock(self, model_executed)

        return post_step

    replace("v1.engine.core:EngineCore.post_step", make)


def scheduled_at(output: SchedulerOutput) -> float:
    """When a step that one of our schedulers has scheduled was: seconds of the monotonic clock."""
    return output.scheduled_at


class _WholePrefixes:
    """vLLM's manager of the KV cache, which finds no prefix that ends where a prefill may not."""

    def __init__(self, manager: Any, prefill_end: Callable[[Request, int], int]) -> None:
        self._manager, self._prefill_end = manager, prefill_end

    def __getattr__(self, name: str) -> Any:
        """All else is the request's own."""
        return getattr(self._manager, name)

    def get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        found = self._manager.get_computed_blocks(request, *args, **kwargs)
        # Not by leaving out blocks of what was found: layers with a window have only its last ones.
        while (longest := self._prefill_end(request, found[1])) < found[1]:
            shorter = _Shorter(request, longest)
            found = self._manager.get_computed_blocks(shorter, *args, **kwargs)
        return found


class _Shorter:
    """A request, as if its prompt were so short that at most `longest` tokens may be cached: all
    but the last one."""

    def __init__(self, request: Request, longest: int) -> None:
        self._request, self.num_tokens = request, longest + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def tokens_in_flight(request: Request, num_kept: int) -> int:
    """Counts, for `SchedulerHooks.request_stopped`, tokens of a step whose output is to come, which
    vLLM counts as computed, and takes off again when it caches blocks."""
    if version.is_at_least("0.33"):
        return request.num_in_flight_tokens
    return max(request.num_output_placeholders - num_kept, 0)


def http_request_of(request_id: str) -> str:
    """The part of a request's name that it shares with the others of the same HTTP request."""
    parent = re.sub(r"^\d+_", "", request_id)  # of n answers
    prompt = parent.rpartition("-")[0] or parent  # without the random end
    # A completion numbers its prompts.
    return re.sub(r"-\d+$", "", prompt) if prompt.startswith("cmpl-") else prompt


StockDiffusionScheduler = diffusion_scheduler.DiffusionScheduler

StockDiffusionAsyncScheduler = diffusion_scheduler.DiffusionAsyncScheduler

stock_canvas_width = diffusion_scheduler.diffusion_canvas_width
