"""What `usage` says about an answer's tokens, in vLLM's chats and completions, streamed or not.

Results of the engine are counted as they come, for the HTTP request whose task asked for them. That
task, or one that it started, makes the `usage`, and finds the counts by its context.
"""

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any, Protocol

from vllm_dllm.compat import version
from vllm_dllm.compat.metrics import Steps, take_steps
from vllm_dllm.compat.patching import is_server, replace


class TokenCounter(Protocol):
    """Counts tokens of a request's answers."""

    def add(self, answer: Any, tokens: Any) -> None:
        """The next tokens of the answer that `answer` names."""

    def counts(self) -> dict[str, int]:
        """What `usage.completion_tokens_details` is to say."""


class _Counter:
    """Counts what `usage` says of an HTTP request to a diffusion model."""

    def __init__(self) -> None:
        self.tokens: TokenCounter | None = None
        self.ends: dict[int, str | None] = {}  # why each answer of a chat has ended
        self._steps: list[Steps] = []  # of each answer that is finished

    def add(self, result: Any) -> None:
        for output in result.outputs:
            if self.tokens is not None:
                self.tokens.add((result.request_id, output.index), output.token_ids)
            if (steps := take_steps(output)) is not None:
                self._steps.append(steps)
            self.ends[output.index] = output.finish_reason

    def counts(self) -> dict[str, int]:
        """What is known so far: steps are, when an answer is finished."""
        found = {} if self.tokens is None else self.tokens.counts()
        if self._steps:
            columns = zip(*self._steps, strict=True)
            found |= dict(zip(Steps._fields, map(sum, columns), strict=True))
        return found


_counter: ContextVar[_Counter | None] = ContextVar("of this task's HTTP request", default=None)


def count_http_request() -> None:
    """What this task asks of the engine from now on is one HTTP request's, to a diffusion model."""
    _counter.set(_Counter())


def counted(
    results: AsyncIterator[Any], start: Callable[[], TokenCounter | None]
) -> AsyncIterator[Any]:
    """`results` of the engine, counted as they pass, if an HTTP request has asked for them. `start`
    makes what counts their tokens; all prompts of a request have the same."""
    counter = _counter.get()
    if counter is None:
        return results
    counter.tokens = counter.tokens or start()
    return _passing(results, counter)


async def _passing(results: AsyncIterator[Any], counter: _Counter) -> AsyncIterator[Any]:
    async for result in results:
        counter.add(result)
        yield result


def show_counts() -> None:
    """Puts what was counted into each `usage`, and says `length` of an answer that was cut behind a
    call, where vLLM before 0.33 says `tool_calls`, unless it is streamed. Repeatable, and nothing
    in a process that is no server."""
    if not is_server():
        return
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    def with_counts(stock: Any) -> Any:
        def usage_info(**fields: Any) -> Any:
            usage = stock(**fields)
            if (counter := _counter.get()) is not None:
                details = usage.completion_tokens_details
                known = {} if details is None else details.model_dump()
                usage.completion_tokens_details = CompletionTokenUsageInfo(
                    **known, **counter.counts()
                )
            return usage

        return usage_info

    def with_ends(stock: Any) -> Any:
        async def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
            response = await stock(self, *args, **kwargs)
            if (counter := _counter.get()) is not None:
                for choice in getattr(response, "choices", ()):  # an error has none
                    if counter.ends.get(choice.index) == "length":
                        choice.finish_reason = "length"
            return response

        return answer

    replace("entrypoints.openai.chat_completion.serving:UsageInfo", with_counts)
    replace("entrypoints.openai.completion.serving:UsageInfo", with_counts)
    if not version.is_at_least("0.33"):
        replace(
            "entrypoints.openai.chat_completion.serving:"
            "OpenAIServingChat.chat_completion_full_generator",
            with_ends,
        )
