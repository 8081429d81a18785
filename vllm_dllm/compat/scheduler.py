"""vLLM's scheduler, with some of its steps open to subclasses."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.sched import diffusion_scheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_dllm.compat import version
from vllm_dllm.compat.patching import wrap


class SchedulerHooks(Scheduler):
    """vLLM's scheduler with hooks, which subclasses override and which change nothing here. It also
    mends what vLLM gets wrong with priorities and with LoRA adapters."""

    _worker_masks = True  # the worker gets grammar bitmasks
    _last_arrival = 0.0  # seconds since the epoch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ask_for_draft_tokens_only_if_needed()
        self.kv_cache_manager = _PrefixesAtPrefillEnds(
            self.kv_cache_manager,  # type: ignore[has-type]
            self.prefill_end,
        )

    def add_request(self, request: Request) -> None:
        """Adds `request` as one that arrived later than all before it. With priorities vLLM
        preempts the latest, and the first of several that came at once, as the answers of one
        request do (`n`). They would preempt each other for ever: a preempted canvas begins anew."""
        self._last_arrival = max(request.arrival_time, math.nextafter(self._last_arrival, math.inf))
        request.arrival_time = self._last_arrival
        super().add_request(request)

    def leave_room_beside_prompts(self, canvas_length: int) -> None:
        """Has a waiting request start beside others only if its canvas has room in the KV cache,
        too, and under asynchronous scheduling, which plans a step ahead, the canvas behind it. vLLM
        asks for room for the prompt, or for more if the user sets a watermark: a request that has
        just started would be preempted for want of room for its canvas, again and again."""
        num_tokens = canvas_length * (2 if self.scheduler_config.async_scheduling else 1)
        manager = self.kv_cache_manager._manager
        sizes = [each.block_size for each in manager.coordinator.single_type_managers]
        needed = sum(math.ceil(num_tokens / size) for size in sizes)
        manager.watermark_blocks = max(manager.watermark_blocks, needed)

    def set_block_check(self, make_check: Callable[[Any], Any]) -> None:
        """Has emitted blocks checked by `make_check(manager)`, in place of vLLM's
        `StructuredOutputManager`. From now on the worker gets no grammar bitmasks."""
        before = self.structured_output_manager  # type: ignore[has-type]
        self.structured_output_manager = make_check(before)
        self._worker_masks = False

    @property
    def knows_draft_tokens(self) -> bool:
        """Whether the engine need not ask the worker for draft tokens. Here it must."""
        return False

    def sitting_out(self) -> Sequence[Request]:
        """Hook. Returns running requests that the next step leaves out; here none."""
        return ()

    def held_back(self) -> Sequence[Request]:
        """Hook. Returns waiting requests that must not start in the next step; here none."""
        return ()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Returns the next step, without requests that sit out or are held back. Requests that are
        held back leave the waiting queue meanwhile, and are then added to it anew."""
        for request in self.sitting_out():
            earliest = self.current_step + 2  # the step to be is the next one
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, earliest)
        if held := list(self.held_back()):
            self.waiting.remove_requests(held)
        lacking: list[Request] = []
        if self.lora_config is not None:
            # vLLM counts only adapters of the step. Requests that it leaves out need theirs later.
            lacking = lacking_adapters(self.running, self.waiting, self.lora_config.max_loras)
            self.waiting.remove_requests(lacking)
        output = super().schedule(*args, **kwargs)
        for request in held:
            self.waiting.add_request(request)
        for request in reversed(lacking):  # which keep their places
            self.waiting.prepend_request(request)
        if not self._worker_masks:
            # Else vLLM waits for the last step's tokens and makes masks of the drafts. Set after
            # vLLM's `schedule`: its asynchronous scheduler sets them last.
            output.has_structured_output_requests = False
            output.pending_structured_output_tokens = False
        return output

    def complete_output(self, output: SchedulerOutput) -> None:
        """Hook. Called with a planned step, to change it in place, before requests count it."""

    def output_counted(self, output: SchedulerOutput) -> None:
        """Hook. Called when requests have counted the step `output`, before the worker gets it."""

    def block_emitted(self, request: Request, block_length: int) -> None:
        """Hook. Called when `request` has got a block of `block_length` tokens and goes on."""

    def request_stopped(self, request: Request, block_length: int, num_kept: int) -> None:
        """Hook. Called when `request` has ended with a block of `block_length` tokens, of which it
        keeps the first `num_kept`. It still has its cache blocks, unless it was preempted and has
        no computed tokens."""

    def is_cut(self, request: Request) -> bool:
        """Hook. Returns whether the stop token that `request` ended with was only added because its
        tokens ran out; here never. The token is then removed, and the request ends by length."""
        return False

    def output_arrived(self, output: ModelRunnerOutput) -> None:
        """Hook. Called with the worker's output, before it updates requests."""

    def output_processed(self, output: SchedulerOutput) -> None:
        """Hook. Called when requests are updated by the output of the step `output`."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Updates requests by a step's output as vLLM does, between calls of two hooks."""
        self.output_arrived(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.output_processed(scheduler_output)
        return outputs

    def num_computed_of_session(self, session: Request) -> int | None:
        """Hook. Returns how many tokens of a session of streamed inputs are not computed again when
        its next input comes. It keeps all of its tokens then. None, as here: vLLM drops some."""
        return None

    def prefill_end(self, request: Request, end: int) -> int:
        """Hook. Returns the position up to `end` at which a chunk of a prompt must end; here
        `end`."""
        return end

    def take_new_blocks_to_zero(self) -> list[int]:
        """Returns ids of cache blocks allocated since the last call, which must be zeroed."""
        return self._get_new_block_ids_to_zero() or []

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kw: Any
    ) -> Any:
        """Shortens a chunk of a prompt to `prefill_end`, and lets vLLM schedule it."""
        end = self.prefill_end(request, num_computed_tokens + num_new_tokens)
        num_new_tokens = max(0, end - num_computed_tokens)
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kw
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Counts a planned step in its requests, between calls of two hooks, and notes the time."""
        scheduler_output.scheduled_at = time.monotonic()
        self.complete_output(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        self.output_counted(scheduler_output)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Preempts `request` as vLLM does. First takes what nobody has computed out of the prefix
        cache: vLLM enters a step's blocks when it plans them, and with priorities a request may
        lose its place in a step that is being planned. vLLM 0.33 leaves them there, too."""
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            planned = blocks[request.num_computed_tokens // manager.block_size :]
            manager.block_pool.evict_blocks({block.block_id for block in planned})
        super()._preempt_request(request, *args, **kwargs)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Adds the next input of a session, in place, to the tokens that it keeps."""
        computed = self.num_computed_of_session(session)
        if computed is None:
            return super()._update_request_as_session(session, update)
        session.num_computed_tokens = session.num_tokens  # vLLM 0.32 keeps so many,
        session._all_token_ids.append(0)  # and 0.33 all but the last
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = computed

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Adds tokens to a request, in place. Returns those it keeps, and whether it has ended."""
        block_length = len(new_token_ids)
        kept, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if stopped:
            self.request_stopped(request, block_length, len(kept))
            if self.connector is not None and not request.resumable:
                # As vLLM has it: connectors pair the blocks of two engines by this number.
                most = request.num_tokens - 1
                request.num_computed_tokens = min(request.num_computed_tokens, most)
            if request.status == RequestStatus.FINISHED_STOPPED and self.is_cut(request):
                request.status, request.stop_reason = RequestStatus.FINISHED_LENGTH_CAPPED, None
                kept = kept[:-1]
        else:
            self.block_emitted(request, block_length)
        return kept, stopped


def lacking_adapters(
    running: Iterable[Request], waiting: Iterable[Request], most: int
) -> list[Request]:
    """Returns the `waiting` requests with which there would be more than `most` LoRA adapters, next
    to those of `running` requests and of waiting ones before them. Also returns requests whose
    adapter has the name of another of these. Such an adapter was loaded anew, and vLLM's worker,
    which tells adapters apart by name, would load one of the two for the step."""
    used: dict[str, tuple[int, str]] = {}  # name -> id and path
    lacking = []
    # Running requests share steps already.
    for request, is_waiting in [(r, False) for r in running] + [(r, True) for r in waiting]:
        if (lora := request.lora_request) is None:
            continue
        adapter = (lora.lora_int_id, lora.lora_path)
        fits = lora.lora_name in used or len(used) < most
        if is_waiting and not (fits and used.get(lora.lora_name, adapter) == adapter):
            lacking.append(request)
        else:
            used[lora.lora_name] = adapter
    return lacking


def ask_for_draft_tokens_only_if_needed() -> None:
    """Patches this process' engine to ask its worker for draft tokens after a step only if its
    scheduler does not know them. Saves a round trip, 0.7 of 15 ms on two cores. Repeatable."""

    @wrap("v1.engine.core:EngineCore.post_step")
    def post_step(stock: Any, self: Any, model_executed: bool) -> None:
        if not getattr(self.scheduler, "knows_draft_tokens", False):
            stock(self, model_executed)


def scheduled_at(output: SchedulerOutput) -> float:
    """Returns when our scheduler planned the step `output`, in seconds of the monotonic clock."""
    return output.scheduled_at


class _PrefixesAtPrefillEnds:
    """Wraps vLLM's KV cache manager and finds only prefixes that end where a prefill may end."""

    def __init__(self, manager: Any, prefill_end: Callable[[Request, int], int]) -> None:
        self._manager, self._prefill_end = manager, prefill_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Returns the cached blocks and the length in tokens of the longest cached prefix at whose
        end a prefill may end. vLLM's manager returns more after these two, and so does this."""
        blocks, length, *more = self._manager.get_computed_blocks(request, *args, **kwargs)
        # Asks again, since layers with a window have only the last blocks of a prefix.
        while (longest := self._prefill_end(request, length)) < length:
            shorter = _ShortenedRequest(request, longest)
            blocks, length, *more = self._manager.get_computed_blocks(shorter, *args, **kwargs)
        return blocks, length, *more


class _ShortenedRequest:
    """Wraps a request, and looks as if at most `longest` tokens of its prompt may come from the
    cache. vLLM never takes the last token from there."""

    def __init__(self, request: Request, longest: int) -> None:
        self._request, self.num_tokens = request, longest + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def num_tokens_in_flight(request: Request, num_kept: int) -> int:
    """Returns how many tokens of `request` belong to steps whose output is still to come. vLLM
    counts these as computed, and subtracts them when it caches blocks.

    Call it only in `SchedulerHooks.request_stopped`, with the hook's `num_kept`: at any other time
    the number is wrong before vLLM 0.33.
    """
    if version.is_at_least("0.33"):
        return request.num_in_flight_tokens
    # vLLM's asynchronous scheduler takes the kept tokens off its placeholders only after this hook.
    # The other one has no placeholders.
    return max(request.num_output_placeholders - num_kept, 0)


StockDiffusionScheduler = diffusion_scheduler.DiffusionScheduler
StockDiffusionAsyncScheduler = diffusion_scheduler.DiffusionAsyncScheduler
stock_canvas_width = diffusion_scheduler.diffusion_canvas_width
