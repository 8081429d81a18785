"""Adds counts to `usage` of vLLM's chats and completions, streamed or not.

The engine's results are counted as they come, for the HTTP request whose task asked for them. That
task, or one that it started, makes the `usage`, and finds the counts in its context.
"""

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any, Protocol

from vllm_dllm.compat import version
from vllm_dllm.compat.metrics import StepCounts, pop_step_counts
from vllm_dllm.compat.patching import wrap


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
