"""What `usage` says about an answer's tokens, in vLLM's chats and completions, streamed or not."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol


class Counter(Protocol):
    """Of the tokens of a request's answers."""

    def add(self, answer: Any, tokens: Any) -> None:
        """The next tokens of the answer that `answer` names."""

    def counts(self) -> dict[str, int]:
        """What `usage.completion_tokens_details` is to say."""


def count_in_usage(start: Callable[[Any, Any], Counter | None]) -> None:
    """`start(request, tokenizer)` makes a counter for a request to a diffusion model, or None.
    Repeatable, and nothing in a process that is no server."""
    if "vllm.entrypoints.launchers.launcher" not in sys.modules:
        return
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    if OpenAIServingChat.chat_completion_stream_generator.__module__ == __name__:
        return
    stock_chat_stream = OpenAIServingChat.chat_completion_stream_generator
    stock_chat = OpenAIServingChat.chat_completion_full_generator
    stock_stream = OpenAIServingCompletion.completion_stream_generator
    stock_completion = OpenAIServingCompletion.request_output_to_completion_response

    def counter_of(serving: Any, request: Any) -> Counter | None:
        is_ours = serving.model_config.is_diffusion
        return start(request, serving.renderer.tokenizer) if is_ours else None

    def chat_stream(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        if (counter := counter_of(self, request)) is None:
            return stock_chat_stream(self, request, results, *args, **kwargs)
        counted = _counted(results, counter)
        return _with_counts(stock_chat_stream(self, request, counted, *args, **kwargs), counter)

    async def chat(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        if (counter := counter_of(self, request)) is None:
            return await stock_chat(self, request, results, *args, **kwargs)
        # One result, which holds the whole answers.
        counted = _counted(results, counter)
        return _put(await stock_chat(self, request, counted, *args, **kwargs), counter)

    def completion_stream(
        self: Any, request: Any, inputs: Any, results: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if (counter := counter_of(self, request)) is None:
            return stock_stream(self, request, inputs, results, *args, **kwargs)
        counted = _counted(results, counter)
        stream = stock_stream(self, request, inputs, counted, *args, **kwargs)
        return _with_counts(stream, counter)

    def completion(self: Any, results: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        response = stock_completion(self, results, request, *args, **kwargs)
        if (counter := counter_of(self, request)) is None:
            return response
        for prompt, result in enumerate(results):
            _count(counter, prompt, result)
        return _put(response, counter)

    serving_chat: Any = OpenAIServingChat
    serving_completion: Any = OpenAIServingCompletion
    serving_chat.chat_completion_stream_generator = chat_stream
    serving_chat.chat_completion_full_generator = chat
    serving_completion.completion_stream_generator = completion_stream
    serving_completion.request_output_to_completion_response = completion


def _count(counter: Counter, prompt: int, result: Any) -> None:
    for output in result.outputs:
        counter.add((prompt, output.index), output.token_ids)


async def _counted(results: AsyncIterator[Any], counter: Counter) -> AsyncIterator[Any]:
    """Those of a completion come with the number of their prompt."""
    async for result in results:
        _count(counter, *(result if isinstance(result, tuple) else (0, result)))
        yield result


async def _with_counts(stream: AsyncIterator[str], counter: Counter) -> AsyncIterator[str]:
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


def _put(response: Any, counter: Counter) -> Any:
    """Into a response, unless it is an error."""
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    usage = getattr(response, "usage", None)
    if usage is not None:
        details = usage.completion_tokens_details
        known = details.model_dump() if details is not None else {}
        usage.completion_tokens_details = CompletionTokenUsageInfo(**known, **counter.counts())
    return response
