"""One engine prefills, another answers: prompts travel through one of vLLM's KV connectors."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config.kv_transfer import KVRole

from tests.engine.conftest import HELD_OUT, TRAINED, GetEngine, connector, tokens_of
from tests.engine.one_step import random_ids

BLOCK = 32  # tokens of the KV cache


def test_the_answers_are_those_of_one_engine(engine: GetEngine, tmp_path: Path) -> None:
    """Of a checkpoint that takes no images. Every whole block of the prompts is read."""
    chats = [row["messages"] for row in HELD_OUT if row["task"] == "lookup"][:3]

    def answers(role: KVRole | None, max_tokens: int) -> tuple[list[list[int]], list[int]]:
        options = connector(tmp_path, role) if role is not None else {}
        served = engine(TRAINED, enable_prefix_caching=False, block_size=BLOCK, **options)
        params = [SamplingParams(seed=i, max_tokens=max_tokens) for i in range(len(chats))]
        outputs = served.llm.chat(chats, params, use_tqdm=False)
        read = [output.num_cached_tokens or 0 for output in outputs]
        return list(map(tokens_of, outputs)), read

    answers("kv_producer", max_tokens=1)
    found, read = answers("kv_consumer", max_tokens=64)
    alone, _ = answers(None, max_tokens=64)
    assert found == alone
    assert min(read) >= BLOCK and not any(count % BLOCK for count in read)


def test_as_many_blocks_are_offered_as_the_prompt_has(
    engine: GetEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """Connectors that pair the last blocks of two engines would else be off by one."""
    served = engine(
        TRAINED,
        enable_prefix_caching=False,
        block_size=BLOCK,
        async_scheduling=is_ahead,
        **connector(tmp_path, "kv_producer"),
    )
    scheduler = served.scheduler
    stock, computed = scheduler._connector_finished, []

    def finished(request: Any) -> Any:
        computed.append(request.num_computed_tokens)
        return stock(request)

    monkeypatch.setattr(scheduler, "_connector_finished", finished)
    prompts = [random_ids(n, 512, n) for n in (2 * BLOCK, 3 * BLOCK - 1)]
    served.ask(prompts, SamplingParams(max_tokens=1))
    assert sorted(computed) == [2 * BLOCK, 3 * BLOCK - 1]
