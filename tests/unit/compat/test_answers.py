"""What vLLM says beside an answer's text: its `finish_reason`, log-probabilities with the step that
revealed a token, and the texts of tokens."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm.logprobs import Logprob
from vllm.v1.engine import logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from tests.paths import CHECKPOINTS
from vllm_dllm.compat import usage
from vllm_dllm.compat.logprobs import (
    RevealedLogprob,
    cache_token_texts,
    pack_step_into_ranks,
    return_revealed_steps,
)
from vllm_dllm.compat.worker_logprobs import restrict_prompt_logprobs

TOKENS = np.array([[3, 7], [5, 5]])
SCORES = np.array([[-1.5, -0.5], [-0.25, -0.25]], dtype=np.float32)


def read(ranks: torch.Tensor, num_logprobs: int) -> list[dict[int, Logprob]]:
    processor = LogprobsProcessor(None, [], None, 0.0, num_logprobs, None)
    processor._update_sample_logprobs(LogprobsLists(TOKENS, SCORES, ranks.numpy()))
    assert isinstance(processor.logprobs, list)
    return processor.logprobs


def test_steps_travel_with_ranks() -> None:
    return_revealed_steps()
    return_revealed_steps()
    ranks = torch.tensor([150_000, 1])
    plain = read(ranks, 1)
    assert plain == [{3: Logprob(-1.5, 150_000), 7: Logprob(-0.5, 1)}, {5: Logprob(-0.25, 1)}]
    for num_logprobs in (0, 1, -1):
        marked = read(
            torch.stack([pack_step_into_ranks(ranks[0], 0), pack_step_into_ranks(ranks[1], 64)]),
            num_logprobs,
        )
        assert marked[0][3] == RevealedLogprob(-1.5, 150_000, step=0)
        assert marked[1] == {5: RevealedLogprob(-0.25, 1, step=64)}
        assert (7 in marked[0]) == (num_logprobs != 0)
        if num_logprobs:
            assert marked[0][7] == plain[0][7]


def test_texts_of_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, asked = logprobs.convert_ids_list_to_tokens, []

    def count(tokenizer: object, token_ids: list[int]) -> list[str]:
        asked.extend(token_ids)
        return stock(tokenizer, token_ids)

    monkeypatch.setattr(logprobs, "convert_ids_list_to_tokens", count)
    name = "vllm.entrypoints.launchers.launcher"
    monkeypatch.delitem(sys.modules, name, raising=False)  # other tests import it
    cache_token_texts()
    assert logprobs.convert_ids_list_to_tokens is count  # no server
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    cache_token_texts()
    cache_token_texts()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "diffusiongemma-tiny")
    tokens = [*range(len(tokenizer)), 7, 7]
    for _ in range(2):
        assert logprobs.convert_ids_list_to_tokens(tokenizer, tokens) == stock(tokenizer, tokens)
    assert logprobs.convert_ids_list_to_tokens(tokenizer, []) == []
    assert asked == tokens[:-2]


def test_a_request_that_leaves_is_forgotten() -> None:
    heard: list[tuple[Any, ...]] = []
    stock = SimpleNamespace(
        add_request=lambda *args: heard.append(args),
        remove_request=lambda *args: heard.append(args),
        in_progress="vLLM's",
    )
    tokens = torch.full((3, 4), 7)
    runner: Any = SimpleNamespace(
        prompt_logprobs_worker=stock,
        req_states=SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens)),
    )
    restrict_prompt_logprobs(runner)
    scores = runner.prompt_logprobs_worker
    scores.add_request("a", 1, None)
    scores.add_request("b", 2, None)
    scores.remove_request("a")
    scores.remove_request("never came")
    assert tokens.tolist() == [[7] * 4, [0] * 4, [7] * 4]
    assert heard == [("a", 1, None), ("b", 2, None), ("a",), ("never came",)]
    assert scores.in_progress == "vLLM's"


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
