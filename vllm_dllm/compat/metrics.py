"""Numbers of canvases in vLLM's statistics, which carry them from a scheduler to the API server: to
its metrics, and to the `usage` of each request.

The engine's results are counted as they come, for the HTTP request whose task asked for them. That
task, or one that it started, makes the `usage` of a chat or completion, streamed or not, and finds
the counts in its context.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.compat import version
from vllm_dllm.compat.drafting import is_dflash
from vllm_dllm.compat.patching import patch, set_entry, wrap


@dataclass
class CanvasSpecDecodingStats(SpecDecodingStats):
    """vLLM's counts of drafts of a step, with those of canvases added.

    Acceptance per position means nothing for canvases, so it is not counted: it would take a loop
    over every canvas' positions, and a longer message.
    """

    canvas_counts: dict[str, Any] | None = None
    """Fields of `CanvasCounts` by name. None: no canvas is counted."""

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens


_SpecDecodingStats = CanvasSpecDecodingStats | None

Labels = Mapping[int, Sequence[Any]]  # values of labels by engine


class CanvasMetrics(Protocol):
    """Observes the `canvas_counts` of an engine's step."""

    def observe(self, canvas_counts: Mapping[str, Any], engine: int) -> None: ...


class DraftMetrics(Protocol):
    """Observes the drafts of an engine's step: how many requests verified some, and accepted and
    drafted tokens by position."""

    def observe(
        self, num_verified: int, accepted: Sequence[int], drafted: Sequence[int], engine: int
    ) -> None: ...


def set_metrics(
    make_canvas_metrics: Callable[[Sequence[str], Labels], CanvasMetrics],
    make_draft_metrics: Callable[[Sequence[str], Labels], DraftMetrics],
) -> None:
    """Has our metrics made and updated beside vLLM's own, by a patch of its logger. Metrics of
    canvases count `canvas_counts` of diffusion models. Metrics of drafts count vLLM's numbers per
    position, where a DFlash drafter is served. Repeatable.

    The two functions get vLLM's label names, and label values by engine. Ray has metric classes of
    its own and collects neither.
    """
    # What messages to the API process are decoded as.
    set_entry(
        "v1.metrics.stats:SchedulerStats.__annotations__", "spec_decoding_stats", _SpecDecodingStats
    )

    def make(stock: Any) -> Any:
        """Returns a subclass of vLLM's metrics of drafts, `stock`, that also has ours."""

        class Metrics(stock):
            """vLLM's metrics of drafts and, where they apply, ours of canvases or drafts."""

            def __init__(
                self,
                speculative_config: Any,
                labelnames: list[str],
                per_engine_labelvalues: dict[int, list[object]],
                is_diffusion: bool = False,
            ) -> None:
                """Makes vLLM's metrics, and ours for a diffusion model or a DFlash drafter."""
                super().__init__(
                    speculative_config, labelnames, per_engine_labelvalues, is_diffusion
                )
                labels = (labelnames, per_engine_labelvalues)
                self.canvas_metrics = make_canvas_metrics(*labels) if is_diffusion else None
                drafts = is_dflash(speculative_config)
                self.draft_metrics = make_draft_metrics(*labels) if drafts else None

            def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
                """Adds a step's statistics to vLLM's metrics and to ours."""
                super().observe(spec_decoding_stats, engine_idx)
                canvas_counts = getattr(spec_decoding_stats, "canvas_counts", None)
                if self.canvas_metrics is not None and canvas_counts is not None:
                    self.canvas_metrics.observe(canvas_counts, engine_idx)
                if self.draft_metrics is not None:
                    self.draft_metrics.observe(
                        spec_decoding_stats.num_drafts,
                        spec_decoding_stats.num_accepted_tokens_per_pos,
                        spec_decoding_stats.num_draft_tokens_per_pos,
                        engine_idx,
                    )

        return Metrics

    patch("v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls", make)


class StepCounts(NamedTuple):
    """Counts of the steps of a finished answer."""

    denoise_steps: int
    forwards: int  # of its canvases; those of its prompt are not counted


class RequestSteps(RequestSpecDecodeMetrics):
    """The steps of one request, carried in vLLM's counts of its drafts.

    Entry 0 of `histogram` counts denoise steps apart from forwards, since one step may denoise a
    canvas and commit it. The two lists have an entry for each forward.
    """

    def count_denoise_step(self) -> None:
        """Adds 1 to entry 0 of `histogram`, which `observe` leaves alone."""
        self.histogram[0] += 1

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Counts a forward of the request's canvas: adds an entry to both lists, and counts
        `num_accepted` in `histogram` unless it is 0."""
        self.num_draft_tokens += num_draft_tokens
        self.per_step_drafted.append(num_draft_tokens)
        self.per_step_accepted.append(num_accepted)
        if num_accepted > 0:
            self.histogram[num_accepted] += 1


def start_step_counts(request: Request, most_tokens: int) -> None:
    """Has the steps of `request` counted from now on. `most_tokens`: of a canvas."""
    request.spec_decode_metrics = RequestSteps.new(most_tokens)


def count_denoise_step(request: Request) -> None:
    """Adds a denoise step to the counts of `request`, if its steps are counted."""
    if isinstance(request.spec_decode_metrics, RequestSteps):
        request.spec_decode_metrics.count_denoise_step()


def pop_step_counts(output: Any) -> StepCounts | None:
    """Returns the step counts of a finished answer, None for an unfinished one. Removes them from
    `output`, vLLM's CompletionOutput, since vLLM would show them as drafts."""
    counts, output.spec_decode_metrics = output.spec_decode_metrics, None
    return None if counts is None else StepCounts(counts.histogram[0], len(counts.per_step_drafted))


class TokenCounter(Protocol):
    """Counts tokens of a request's answers."""

    def add_tokens(self, answer: Any, tokens: Any) -> None:
        """Counts the next tokens of an answer. `answer` identifies it: request id and index.
        `tokens`: their ids."""

    def counts(self) -> dict[str, int]:
        """Returns entries of `usage.completion_tokens_details`."""


class _UsageCounter:
    """Counts what `usage` shows of an HTTP request to a diffusion model."""

    def __init__(self) -> None:
        self.tokens: TokenCounter | None = None
        self.ends: dict[int, str | None] = {}  # why each answer of a chat has ended
        self._steps: list[StepCounts] = []  # of each answer that is finished

    def add(self, result: Any) -> None:
        """Counts a result of the engine, and removes step counts from it."""
        for output in result.outputs:
            if self.tokens is not None:
                self.tokens.add_tokens((result.request_id, output.index), output.token_ids)
            if (steps := pop_step_counts(output)) is not None:
                self._steps.append(steps)
            self.ends[output.index] = output.finish_reason

    def counts(self) -> dict[str, int]:
        """Returns entries of `usage.completion_tokens_details`. Tokens are counted as they come,
        steps only when an answer is finished."""
        found = {} if self.tokens is None else self.tokens.counts()
        if self._steps:
            columns = zip(*self._steps, strict=True)
            found |= dict(zip(StepCounts._fields, map(sum, columns), strict=True))
        return found


_counter: ContextVar[_UsageCounter | None] = ContextVar("of this task's HTTP request", default=None)


def count_http_request() -> None:
    """Begins to count for an HTTP request to a diffusion model. Counts all results that this task,
    and tasks that it starts, ask the engine for."""
    _counter.set(_UsageCounter())


def count_results(
    results: AsyncIterator[Any], start: Callable[[], TokenCounter | None]
) -> AsyncIterator[Any]:
    """Returns the engine's `results`, counted for the HTTP request of this task if there is one.
    `start` makes the counter of tokens, or returns None; all prompts of the request share it."""
    counter = _counter.get()
    if counter is None:
        return results
    counter.tokens = counter.tokens or start()
    return _count_each(results, counter)


async def _count_each(results: AsyncIterator[Any], counter: _UsageCounter) -> AsyncIterator[Any]:
    """Yields `results` unchanged, and adds each to `counter`."""
    async for result in results:
        counter.add(result)
        yield result


def patch_usage() -> None:
    """Adds the counts to each `usage`, by patches of vLLM's chats and completions. Repeatable.

    With vLLM before 0.33, also corrects `finish_reason` to `length` for an answer that was cut
    behind a tool call, unless it is streamed.
    """

    chat = "entrypoints.openai.chat_completion.serving"

    @wrap(f"{chat}:UsageInfo")
    @wrap("entrypoints.openai.completion.serving:UsageInfo")
    def usage_info(stock: Any, **fields: Any) -> Any:
        """Returns vLLM's `usage`, with the counts of this task's HTTP request."""
        usage = stock(**fields)
        if (counter := _counter.get()) is not None:
            from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

            details = usage.completion_tokens_details
            known = {} if details is None else details.model_dump()
            usage.completion_tokens_details = CompletionTokenUsageInfo(**known, **counter.counts())
        return usage

    if version.is_at_least("0.33"):
        return

    @wrap(f"{chat}:OpenAIServingChat.chat_completion_full_generator")
    async def answer(stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a chat's answer with its `finish_reason` corrected."""
        response = await stock(*args, **kwargs)
        if (counter := _counter.get()) is not None:
            for choice in getattr(response, "choices", ()):  # an error has none
                if counter.ends.get(choice.index) == "length":
                    choice.finish_reason = "length"
        return response
