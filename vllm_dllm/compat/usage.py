"""Counts of steps and tokens in the `usage` of chats and completions.

The scheduler counts a request's steps in vLLM's counts of its drafts, which come with its answer.
The engine's results are counted as they come, for the HTTP request whose task asked for them. That
task, or one that it started, makes the `usage`, streamed or not, and finds the counts in its
context.
"""

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request

from vllm_dllm.compat import version
from vllm_dllm.compat.patching import wrap


class StepCounts(NamedTuple):
    """Counts of the steps of a finished answer."""

    denoise_steps: int
    forwards: int  # of its canvases; those of its prompt are not counted


class RequestSteps(RequestSpecDecodeMetrics):
    """The steps of one request, carried in vLLM's counts of its drafts.

    Entry 0 of `histogram` counts denoise steps (`count_denoise_step`) apart from forwards, since
    one step may denoise a canvas and commit it. The two lists have an entry for each forward.
    """

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Counts a forward: an entry in both lists, and `num_accepted` in `histogram` if not 0."""
        self.num_draft_tokens += num_draft_tokens
        self.per_step_drafted.append(num_draft_tokens)
        self.per_step_accepted.append(num_accepted)
        if num_accepted > 0:
            self.histogram[num_accepted] += 1


def start_step_counts(request: Request, most_tokens: int) -> None:
    """Has the steps of `request` counted from now on. `most_tokens`: the longest canvas."""
    request.spec_decode_metrics = RequestSteps.new(most_tokens)


def count_denoise_step(request: Request) -> None:
    """Adds a denoise step to the counts of `request`, if its steps are counted."""
    if isinstance(request.spec_decode_metrics, RequestSteps):
        request.spec_decode_metrics.histogram[0] += 1


def pop_step_counts(output: Any) -> StepCounts | None:
    """Returns the step counts of a finished answer, None for an unfinished one. Removes them from
    `output`, vLLM's CompletionOutput, since vLLM would show them as drafts."""
    counts, output.spec_decode_metrics = output.spec_decode_metrics, None
    return None if counts is None else StepCounts(counts.histogram[0], len(counts.per_step_drafted))


class TokenCounter(Protocol):
    """Counts tokens of a request's answers."""

    def add_tokens(self, answer: Any, tokens: Any) -> None:
        """Counts the ids `tokens`, next in an answer. `answer`: its request id and index."""

    def counts(self) -> dict[str, int]:
        """Returns entries of `usage.completion_tokens_details`."""


@dataclass
class _UsageCounter:
    """Counts what `usage` shows of an HTTP request to a diffusion model."""

    tokens: TokenCounter | None = None
    ends: dict[int, str | None] = field(default_factory=dict)
    """Why each answer of a chat has ended, by its index; None: it has not."""
    steps: list[StepCounts] = field(default_factory=list)
    """Counts of each finished answer."""

    def add_result(self, result: Any) -> None:
        """Counts a result of the engine, and removes step counts from it."""
        for output in result.outputs:
            if self.tokens is not None:
                self.tokens.add_tokens((result.request_id, output.index), output.token_ids)
            if (steps := pop_step_counts(output)) is not None:
                self.steps.append(steps)
            self.ends[output.index] = output.finish_reason

    def counts(self) -> dict[str, int]:
        """Returns entries of `usage.completion_tokens_details`; steps only of finished answers."""
        found = {} if self.tokens is None else self.tokens.counts()
        if self.steps:
            columns = zip(*self.steps, strict=True)
            found |= dict(zip(StepCounts._fields, map(sum, columns), strict=True))
        return found


_counter: ContextVar[_UsageCounter | None] = ContextVar("of this task's HTTP request", default=None)


def count_http_request() -> None:
    """Begins to count for an HTTP request to a diffusion model. Counts all results that this task,
    and tasks that it starts, ask the engine for."""
    _counter.set(_UsageCounter())


def count_results(
    results: AsyncIterator[Any], make_counter: Callable[[], TokenCounter | None]
) -> AsyncIterator[Any]:
    """Returns the engine's `results`, counted for this task's HTTP request if there is one. All
    prompts of the request share one counter of tokens, from `make_counter` unless it returns
    None."""
    counter = _counter.get()
    if counter is None:
        return results
    counter.tokens = counter.tokens or make_counter()

    async def count_each() -> AsyncIterator[Any]:
        async for result in results:
            counter.add_result(result)
            yield result

    return count_each()


def patch_usage() -> None:
    """Adds the counts to each `usage`, by patches of vLLM's chats and completions. Repeatable.

    With vLLM before 0.33, also corrects `finish_reason` to `length` or `abort` for an answer that
    was cut behind a tool call, unless it is streamed.
    """

    @wrap("entrypoints.serve.engine.protocol:UsageInfo.__init__")
    def make_usage(stock: Any, self: Any, **fields: Any) -> None:
        """Makes vLLM's `usage`, with the counts of this task's HTTP request."""
        stock(self, **fields)
        if (counter := _counter.get()) is not None:
            from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

            details = self.completion_tokens_details
            known = {} if details is None else details.model_dump()
            self.completion_tokens_details = CompletionTokenUsageInfo(**(known | counter.counts()))

    if version.is_at_least("0.33"):
        return

    chat = "entrypoints.openai.chat_completion.serving:OpenAIServingChat"

    @wrap(f"{chat}.chat_completion_full_generator")
    async def answer(stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a chat's answer with its `finish_reason` corrected."""
        response = await stock(*args, **kwargs)
        if (counter := _counter.get()) is not None:
            for choice in getattr(response, "choices", ()):  # an error has none
                if (end := counter.ends.get(choice.index)) in ("length", "abort"):
                    choice.finish_reason = end
        return response
