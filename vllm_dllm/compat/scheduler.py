"""vLLM's scheduler, with some of its steps open to subclasses."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched import diffusion_scheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.compat import version


class SchedulerHooks(Scheduler):
    """vLLM's scheduler, with some of its steps open to subclasses."""

    _worker_masks = True  # the worker gets the masks of grammars

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _ask_for_draft_tokens_only_if_needed()
        _forget_what_old_weights_computed()
        _limit_cache_hits(self.kv_cache_manager, self.prefill_end)

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
        """Where a part of `request`'s prompt that may go to the position `end` is to end."""
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
        else:
            self.block_emitted(request, block_length)
        return kept, stopped


def _ask_for_draft_tokens_only_if_needed() -> None:
    """After each step the engine asks the worker for draft tokens, a round trip between processes
    (0.7 ms of 15 on two cores). A scheduler that knows them spares it. Repeatable."""
    from vllm.v1.engine.core import EngineCore  # loaded by now: it makes the scheduler

    if EngineCore.post_step.__module__ == __name__:
        return
    stock_post_step = EngineCore.post_step

    def post_step(self: EngineCore, model_executed: bool) -> None:
        if not getattr(self.scheduler, "knows_draft_tokens", False):
            stock_post_step(self, model_executed)

    EngineCore.post_step = post_step


def _forget_what_old_weights_computed() -> None:
    """An engine whose workers have reloaded their weights drops the keys and values of the old
    ones, and computes those of running requests again. Repeatable."""
    from vllm.v1.engine.core import EngineCore  # as above

    if EngineCore.collective_rpc.__module__ == __name__:
        return
    stock_rpc = EngineCore.collective_rpc

    # vLLM reads these parameters when a client calls.
    def collective_rpc(
        self: EngineCore,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if method != "reload_weights":
            return stock_rpc(self, method, timeout, args, kwargs)
        try:
            return stock_rpc(self, method, timeout, args, kwargs)
        finally:
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            self.reset_encoder_cache()

    EngineCore.collective_rpc = collective_rpc


def scheduled_at(output: SchedulerOutput) -> float:
    """When a step that one of our schedulers has scheduled was: seconds of the monotonic clock."""
    return output.scheduled_at


def _limit_cache_hits(manager: Any, prefill_end: Callable[[Request, int], int]) -> None:
    """Makes `manager`, a KV cache manager, find no prefix that ends where a prefill may not."""
    find, coordinator = manager.get_computed_blocks, manager.coordinator
    stock_find_longest = coordinator.find_longest_cache_hit

    def get_computed_blocks(request: Request, *args: Any, **kwargs: Any) -> Any:
        found = find(request, *args, **kwargs)
        # Not by leaving out blocks of what was found: layers with a window have only its last ones.
        while (longest := prefill_end(request, found[1])) < found[1]:

            def find_shorter(hashes: Any, most_tokens: int, longest: int = longest) -> Any:
                return stock_find_longest(hashes, min(most_tokens, longest))

            coordinator.find_longest_cache_hit = find_shorter
            try:
                found = find(request, *args, **kwargs)
            finally:
                coordinator.find_longest_cache_hit = stock_find_longest
        return found

    manager.get_computed_blocks = get_computed_blocks


def tokens_in_flight(request: Request, num_kept: int) -> int:
    """For `SchedulerHooks.request_stopped`: tokens of a step whose output is still to come, which
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
