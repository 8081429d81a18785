"""Schedules canvases: vLLM's scheduler, without the forwards that a request does not need.

A prompt's last rows and the first denoise step share a forward: the prompt's rows are causal, and
the canvas' rows see everything. A finished block is emitted by the step that finishes it, and its
tokens are then prefilled like a prompt's, next to the next canvas: that is its commit. The last
block is not committed, because nobody would read its keys and values. No canvas is wider than the
tokens that its request may still get (`families`).
"""

from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.compat.grammar import BlockCheck
from vllm_dllm.compat.runner import get_canvas_numbers
from vllm_dllm.compat.scheduler import (
    StockDiffusionAsyncScheduler,
    StockDiffusionScheduler,
    num_tokens_in_flight,
)
from vllm_dllm.compat.usage import start_step_counts
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.parents import end_with_parent
from vllm_dllm.requests.ends import was_stop_foreseen
from vllm_dllm.requests.options import load_option, load_options
from vllm_dllm.scheduling.canvas_counter import CanvasCounter, CountedScheduling
from vllm_dllm.scheduling.fair_share import FairShare
from vllm_dllm.scheduling.families import canvas_family
from vllm_dllm.scheduling.prompts import HeldPromptScores, append_canvas, end_before_image
from vllm_dllm.scheduling.spared_forwards import joins_commits, spares_last_commit

logger = init_logger(__name__)


class CanvasScheduling(CountedScheduling):
    """Mixed into both of vLLM's diffusion schedulers. Python resolves it after `AsyncScheduler`, so
    that class' accounting sees the canvases that are added here. Most methods are hooks of
    `compat.scheduler.SchedulerHooks`, which vLLM's scheduler calls during a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError if the server's settings do not suit the model's canvases."""
        super().__init__(*args, **kwargs)
        self.set_block_check(BlockCheck)
        self.leave_room_beside_prompts(self.num_spec_tokens)
        self.spares_last_commit = spares_last_commit(self.vllm_config)
        config = ExtensionConfig.from_additional_config(self.vllm_config.additional_config)
        self.family = canvas_family(self.vllm_config, self.num_spec_tokens)
        self.family.check_server(self.block_size)
        self.fair_share = FairShare.from_config(self.vllm_config, config.limits)
        self.joins_commits = joins_commits(self.vllm_config)
        # Ids of requests, by what the latest step did to them.
        self._committed: frozenset[str] = frozenset()  # it finished and committed their block
        self._verified: frozenset[str] = frozenset()  # it verified a draft of theirs
        self._cut: frozenset[str] = frozenset()  # their grammar closed the answer before its end
        self.counter = None
        if self.log_stats:
            self.counter = CanvasCounter.of_family(self.family, self.vllm_config)
        self.spared_commits = []
        self._prompt_scores = HeldPromptScores()

    def add_request(self, request: Request) -> None:
        """Adds a request, with what this scheduler will do to it in its options for the worker."""
        params = request.sampling_params
        if (options := load_options(params)) is not None:
            fitted = options.narrowing(params.max_tokens, self.num_spec_tokens)
            replace(
                options,
                **(fitted if self.family.fits_canvases else {}),
                joins_commits=self.joins_commits,
                is_counted=self.counter is not None,
                reasoning=self.structured_output_manager.open_reasoning(request),
            ).store_in(params)
            if self.counter is not None:
                rule = options.mode if options.is_verified else options.acceptance
                self.counter.count_request(rule)
        super().add_request(request)
        if self.counter is not None:
            start_step_counts(request, self.num_spec_tokens)

    def sitting_out(self) -> list[Request]:
        """Returns running requests that leave the next step to others (`FairShare`)."""
        return self.fair_share.sitting_out(self.running, self.waiting)

    def held_back(self) -> list[Request]:
        """Returns waiting requests that must not start in the next step (`FairShare`)."""
        return self.fair_share.held_back(self.running, self.waiting) if self.waiting else []

    def prefill_end(self, request: Request, end: int) -> int:
        """Returns `end`, or the first position of the image that it is inside of."""
        return end_before_image(request.mm_features, end)

    # --- a prompt and its first canvas ------------------------------------------------------

    def complete_output(self, output: SchedulerOutput) -> None:
        """Adds the canvas of every request whose prefill a planned step completes, in place. A
        canvas for which the token budget or the KV cache has no room waits for the next step."""
        if not self.family.joins_canvases:
            return
        budget = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        budget -= output.total_num_scheduled_tokens
        for request_id in list(output.num_scheduled_tokens):
            request = self.requests[request_id]
            budget += self._drop_partial_canvas(output, request)
            num_tokens = output.num_scheduled_tokens[request_id]
            if not 0 < (width := self._width_to_append(output, request)) <= budget:
                continue
            blocks = self.kv_cache_manager.allocate_slots(request, num_tokens + width)
            if blocks is None:
                continue
            budget -= width
            append_canvas(output, request_id, width, blocks.get_block_ids(allow_none=True))
        if new_blocks := self.take_new_blocks_to_zero():
            output.new_block_ids_to_zero = [*(output.new_block_ids_to_zero or ()), *new_blocks]

    def _width_to_append(self, output: SchedulerOutput, request: Request) -> int:
        """Returns the width of the canvas that may follow the tokens of `request` in a planned
        step; 0 or less if none may."""
        num_tokens = output.num_scheduled_tokens[request.request_id]
        computed = request.num_computed_tokens + num_tokens
        is_known = computed < request.num_tokens or self.family.waits_for_first_token(computed)
        if is_known or request.request_id in output.scheduled_spec_decode_tokens:
            return 0
        # vLLM's prompt log-probabilities take every row of the request for a prompt row.
        params = request.sampling_params
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            return 0
        # vLLM treats a single new token with drafts as a decode, and has CUDA graphs for it.
        if num_tokens == 1 and request.num_computed_tokens > 0:
            return 0
        return min(self.family.canvas_width(request), self.max_model_len - computed)

    def _drop_partial_canvas(self, output: SchedulerOutput, request: Request) -> int:
        """Removes from a planned step, in place, a canvas that follows prefilled tokens and only
        partly fits the budget. Returns how many tokens that frees; 0 if nothing is removed."""
        request_id = request.request_id
        num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        num_tokens = output.num_scheduled_tokens[request_id]
        room = self.max_model_len - request.num_computed_tokens - num_tokens
        width = self.family.canvas_width(request)
        if not 0 < num_drafts < min(num_tokens, width) or room <= 0:
            return 0
        del output.scheduled_spec_decode_tokens[request_id]
        output.num_scheduled_tokens[request_id] -= num_drafts
        output.total_num_scheduled_tokens -= num_drafts
        return num_drafts

    def uncount_recomputed(self, output: SchedulerOutput, request: Request) -> None:
        """Lowers the request's `num_computed_tokens` by the known tokens of an unfinished block.
        They see positions that may change, so the next step computes them again."""
        num_drafts = len(output.scheduled_spec_decode_tokens.get(request.request_id, ()))
        known = request.num_computed_tokens - num_drafts
        request.num_computed_tokens -= self.family.num_recomputed(known)

    def num_computed_of_session(self, session: Request) -> int:
        """Returns the number of tokens whose keys and values are a prefill's. vLLM would drop the
        last block of an answer, often all of it. `session`: a request whose inputs are streamed."""
        computed = min(session.num_computed_tokens, session.num_tokens)
        return computed - self.family.num_recomputed(computed)

    def output_arrived(self, output: ModelRunnerOutput) -> None:
        """Holds a prompt's log-probabilities in `output` back until its first tokens, in place."""
        self._prompt_scores.delay(output, self.requests)

    # --- finished blocks --------------------------------------------------------------------

    def block_emitted(self, request: Request, block_length: int) -> None:
        """Counts the commit of a block after which `request` goes on. Sets `num_computed_tokens`,
        from which the next step computes, and the placeholders of the next canvas."""
        is_committed = request.request_id in self._committed
        is_verified = request.request_id in self._verified
        if self.counter is not None:
            self.counter.count_emitted_block(request, spares_commit=is_committed)
        if (self.joins_commits or is_committed) and not is_verified:
            self.spared_commits.append(block_length)
        if self.joins_commits and not is_committed:
            # vLLM counted the canvas as accepted drafts, but the next step computes its tokens.
            request.num_computed_tokens -= block_length
        elif request.num_computed_tokens > 0:  # else preempted while this step ran
            request.num_computed_tokens += self.family.num_recomputed(
                request.num_tokens - block_length
            )
        joins_commit = self.joins_commits and not is_verified
        request.spec_token_ids = self.family.placeholders_after_block(request, joins_commit)

    def request_stopped(self, request: Request, block_length: int, num_kept: int) -> None:
        """Enters the last block of a `request` into the prefix cache if a forward has committed it,
        else leaves it out. The request keeps the block's first `num_kept` tokens."""
        if self.counter is not None:
            self.counter.count_emitted_block(request, spares_commit=True)
        if request.num_computed_tokens == 0:
            return  # preempted while this step ran: it has no cache blocks any more
        is_read_only = load_option(request.sampling_params, "read_only")
        is_committed = not (self.spares_last_commit or is_read_only)
        if self.joins_commits:
            is_committed &= was_stop_foreseen(request, num_kept, self.max_model_len)
        if not is_committed:
            # The last block's keys and values are from a denoise step, and no prompt may reuse
            # them: what is computed ends before it, apart from placeholders of a step in flight.
            in_flight = num_tokens_in_flight(request, num_kept)
            request.num_computed_tokens = request.num_tokens - num_kept + in_flight
            if request.request_id not in self._verified:
                self.spared_commits.append(block_length)
        else:
            # Otherwise blocks enter the prefix cache when their successor is scheduled.
            self.kv_cache_manager.cache_blocks(
                request, min(request.num_computed_tokens, request.num_tokens)
            )

    def is_cut(self, request: Request) -> bool:
        """Returns whether a grammar closed the answer because its tokens ran out."""
        return request.request_id in self._cut

    # --- a step's numbers -------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Notes which requests' blocks the step committed, verified or cut, and counts its
        canvases. Then has vLLM update the requests, and returns its outputs."""
        numbers, req_ids = get_canvas_numbers(model_runner_output), model_runner_output.req_ids
        self._verified = self._committed = self._cut = frozenset()
        if numbers is not None:
            self._verified = frozenset(req_ids[i] for i in numbers.requests_flagged("verified"))
            committed = (req_ids[i] for i in numbers.requests_flagged("committed"))
            self._committed = self._verified.union(committed)
            self._cut = frozenset(req_ids[i] for i in numbers.cut)
        if self.counter is not None:
            self.counter.count_step(scheduler_output, model_runner_output, self.requests)
        return super().update_from_output(scheduler_output, model_runner_output)


class CanvasScheduler(StockDiffusionScheduler, CanvasScheduling):
    """Schedules each step when the tokens of the one before are known."""

    knows_draft_tokens = True  # only vLLM's own grammars need to see them

    def output_counted(self, output: SchedulerOutput) -> None:
        """Sets the draft placeholders of the next step's canvases, whose tokens are on the device,
        and takes back known tokens that it computes again."""
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.spec_token_ids = [-1] * self.family.canvas_width(request)
            self.uncount_recomputed(output, request)


class CanvasAsyncScheduler(StockDiffusionAsyncScheduler, CanvasScheduling):
    """Schedules each step before the tokens of the one before are known."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a step. First narrows the draft placeholders of running requests from the
        served canvas to the tokens that may still come."""
        for request in self.running:
            if self.family.may_narrow(request):
                request.spec_token_ids = request.spec_token_ids[: self.family.canvas_width(request)]
        return super().schedule(*args, **kwargs)

    def sitting_out(self) -> list[Request]:
        """Returns what its parent does, and requests that wait for the step in flight."""
        return [*super().sitting_out(), *filter(self._waits, self.running)]

    def _waits(self, request: Request) -> bool:
        """Returns whether the canvas in flight does not tell how wide the next one is: it shares
        its block with the prompt, or the context has no room for a whole canvas behind it."""
        if request.num_output_placeholders == 0:
            return False
        room = int(self.max_model_len - request.num_computed_tokens)
        return self.family.is_partial_block(request) or room < self.family.canvas_width(request)

    def output_counted(self, output: SchedulerOutput) -> None:
        """Takes back known tokens that the next step computes again."""
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            # Of others no known token is in this step, and their earlier ones may not be counted.
            if request.is_prefill_chunk or self.family.num_recomputed(request.num_tokens):
                self.uncount_recomputed(output, request)


def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> CanvasScheduling:
    """Returns the scheduler. This is the `scheduler_cls` of our models (`serving_config`): when
    that is set, vLLM has not yet decided whether to schedule asynchronously. The process then ends
    with its parent."""
    end_with_parent()  # this is the engine's process
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_cls = CanvasAsyncScheduler if is_async else CanvasScheduler
    logger.info(
        "Canvases are scheduled by %s, with asynchronous scheduling %s.",
        scheduler_cls.__name__,
        "on" if is_async else "off",
    )
    return scheduler_cls(vllm_config, *args, **kwargs)
