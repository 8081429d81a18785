"""One engine prefills, another answers: prompts travel through one of vLLM's KV connectors."""

import json
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.config.kv_transfer import KVRole

from tests.engine.conftest import HELD_OUT, TRAINED, GetEngine

BLOCK = 32  # tokens of the KV cache


def test_the_answers_are_those_of_one_engine(engine: GetEngine, tmp_path: Path) -> None:
    """Of a checkpoint that takes no images. Every whole block of the prompts is read."""
    rows = [json.loads(line) for line in HELD_OUT.open()]
    chats = [row["messages"] for row in rows if row["task"] == "lookup"][:3]

    def answers(role: KVRole | None, max_tokens: int) -> tuple[list[list[int]], list[int]]:
        options: dict[str, Any] = {}
        if role is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role=role,
                kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
            )
        served = engine(TRAINED, enable_prefix_caching=False, block_size=BLOCK, **options)
        params = [SamplingParams(seed=i, max_tokens=max_tokens) for i in range(len(chats))]
        outputs = served.llm.chat(chats, params, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        return found, [output.num_cached_tokens or 0 for output in outputs]

    answers("kv_producer", max_tokens=1)
    found, read = answers("kv_consumer", max_tokens=64)
    alone, _ = answers(None, max_tokens=64)
    assert found == alone
    assert min(read) >= BLOCK and not any(count % BLOCK for count in read)
