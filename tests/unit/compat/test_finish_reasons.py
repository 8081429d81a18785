"""The `finish_reason` of a chat's answer whose tool calls vLLM found."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.compat import usage


@pytest.mark.parametrize(
    ("end", "said"), [("stop", "tool_calls"), ("length", "length"), ("abort", "abort")]
)
def test_an_answer_that_was_cut_behind_a_call(
    monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    """Its client must not take the calls for all of them. vLLM 0.33 corrects that itself."""
    monkeypatch.setattr(usage.version, "is_at_least", lambda release: False)
    replacements: dict[str, Any] = {}

    def record(target: str) -> Any:
        return lambda ours: replacements.setdefault(target.rpartition(".")[2], ours)

    monkeypatch.setattr(usage, "wrap", record)
    usage.patch_usage()
    choice = SimpleNamespace(index=0, finish_reason="tool_calls")

    async def stock() -> Any:
        return SimpleNamespace(choices=[choice])

    async def answer() -> None:
        usage.count_http_request()
        output = SimpleNamespace(index=0, finish_reason=end, spec_decode_metrics=None)

        async def results() -> Any:
            yield SimpleNamespace(request_id="a", outputs=[output])

        async for _ in usage.count_results(results(), lambda: None):
            pass
        await replacements["chat_completion_full_generator"](stock)

    asyncio.run(answer())
    assert choice.finish_reason == said
