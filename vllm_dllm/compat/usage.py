"""What `usage` says about an answer's tokens, in vLLM's chats and completions, streamed or not."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from vllm_dllm.compat.cut_answers import noting_ends, say_length
from vllm_dllm.compat.patching import is_server, replace
from vllm_dllm.compat.request_steps import Steps, take_steps


class TokenCounter(Protocol):
    """Counts tokens of a request's answers."""

    def add(self, answer: Any, tokens: Any) -> None:
        """The next tokens of the answer that `answer` names."""

    def counts(self) -> dict[str, int]:
        """What `usage.completion_tokens_details` is to say."""


class _Counter:
    """Counts what `usage` says of a request to a diffusion model."""

    def __init__(self, tokens: TokenCounter | None) -> None:
        self._tokens = tokens
        self._steps: list[Steps] = []  # of each answer that is finished

    def add(self, prompt: int, result: Any) -> None:
        for output in result.outputs:
            if self._tokens is not None:
                self._tokens.add((prompt, output.index), output.token_ids)
            if (steps := take_steps(output)) is not None:
                self._steps.append(steps)

    def counts(self) -> dict[str, int]:
        """What is known so far: steps are, when an answer is finished."""
        found = {} if self._tokens is None else self._tokens.counts()
        if self._steps:
            columns = zip(*self._steps, strict=True)
            found |= dict(zip(Steps._fields, map(sum, columns), strict=True))
        return found


def count_in_usage(start: Callable[[Any, Any], TokenCounter | None]) -> None:
    """Denoise steps and forwards are counted, and what `start(request, tokenizer)` counts, if it
    does. Repeatable, and nothing in a process that is no server."""
    if not is_server():
        return

    def counter_of(serving: Any, request: Any) -> _Counter | None:
        if not serving.model_config.is_diffusion:
            return None
        return _Counter(start(request, serving.renderer.tokenizer))

    def chat_stream(stock: Any) -> Any:
        def stream(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
            if (counter := counter_of(self, request)) is None:
                return stock(self, request, results, *args, **kwargs)
            counted = _counted(results, counter)
            return _with_counts(stock(self, request, counted, *args, **kwargs), counter)

        return stream

    def chat(stock: Any) -> Any:
        async def answer(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
            if (counter := counter_of(self, request)) is None:
                return await stock(self, request, results, *args, **kwargs)
            ends: dict[int, str | None] = {}
            # One result, which holds the whole answers.
            results = _counted(noting_ends(results, ends), counter)
            found = say_length(await stock(self, request, results, *args, **kwargs), ends)
            return _put(found, counter)

        return answer

    def completion_stream(stock: Any) -> Any:
        def stream(
            self: Any, request: Any, inputs: Any, results: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if (counter := counter_of(self, request)) is None:
                return stock(self, request, inputs, results, *args, **kwargs)
            counted = _counted(results, counter)
            return _with_counts(stock(self, request, inputs, counted, *args, **kwargs), counter)

        return stream

    def completion(stock: Any) -> Any:
        def answer(self: Any, results: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if (counter := counter_of(self, request)) is not None:
                for prompt, result in enumerate(results):
                    counter.add(prompt, result)
            response = stock(self, results, request, *args, **kwargs)
            return response if counter is None else _put(response, counter)

        return answer

    of_chat = "entrypoints.openai.chat_completion.serving:OpenAIServingChat"
    of_completion = "entrypoints.openai.completion.serving:OpenAIServingCompletion"
    replace(f"{of_chat}.chat_completion_stream_generator", chat_stream)
    replace(f"{of_chat}.chat_completion_full_generator", chat)
    replace(f"{of_completion}.completion_stream_generator", completion_stream)
    replace(f"{of_completion}.request_output_to_completion_response", completion)


async def _counted(results: AsyncIterator[Any], counter: _Counter) -> AsyncIterator[Any]:
    """Counts results as they pass. A completion's come with the number of their prompt."""
    async for result in results:
        counter.add(*(result if isinstance(result, tuple) else (0, result)))
        yield result


async def _with_counts(stream: AsyncIterator[str], counter: _Counter) -> AsyncIterator[str]:
    """Adds the counts so far to each event that has a `usage`."""
    async for event in stream:
        if '"usage":{' in event:
            message = json.loads(event.removeprefix("data: "))
            if usage := message.get("usage"):
                details = usage.get("completion_tokens_details") or {}
                usage["completion_tokens_details"] = {**details, **counter.counts()}
                compact = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
                event = f"data: {compact}\n\n"
        yield event


def _put(response: Any, counter: _Counter) -> Any:
    """Puts the counts into a response, unless it is an error."""
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    usage = getattr(response, "usage", None)
    if usage is not None:
        details = usage.completion_tokens_details
        known = details.model_dump() if details is not None else {}
        usage.completion_tokens_details = CompletionTokenUsageInfo(**known, **counter.counts())
    return response
