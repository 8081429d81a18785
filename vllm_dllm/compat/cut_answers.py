"""Of an answer with a call that was cut behind it vLLM says `tool_calls`; streamed, `length`."""

from collections.abc import AsyncIterator
from typing import Any


async def noting_ends(results: AsyncIterator[Any], ends: dict[int, str | None]) -> Any:
    """`results` of one request; `ends` gets why each of its answers has ended."""
    async for result in results:
        ends |= {output.index: output.finish_reason for output in result.outputs}
        yield result


def say_length(response: Any, ends: dict[int, str | None]) -> Any:
    """Puts `length` where an answer of a chat's response was cut. Leaves errors as they are."""
    for choice in getattr(response, "choices", ()):
        if ends.get(choice.index) == "length":
            choice.finish_reason = "length"
    return response
