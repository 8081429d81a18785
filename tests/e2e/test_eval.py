"""`vllm-dllm eval` of a shipped quantised checkpoint, and an OpenAI client beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import CANVAS, CHECKPOINT
from vllm_dllm import cli, evaluate
from vllm_dllm.evaluate.harness import Outcome

CHECKPOINTS = CHECKPOINT.parent
FP8 = CHECKPOINTS / "diffusiongemma-tiny-FP8-dynamic"
OPTIONS = "--max-model-len 1024 --kv-cache-memory-bytes 1G --enforce-eager"
NUM_PROMPTS = 12


def test_fp8_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through the harness, and in the same server chat and a stream of a client."""
    asked: list[str] = []

    def ask_first(task: Any, model: str, port: int, **options: Any) -> Outcome:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        request: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "Reverse: rose chair lamp"}],
            "seed": 1,
            "max_tokens": CANVAS,
        }
        answer = client.chat.completions.create(**request)
        stream = client.chat.completions.create(**request, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        asked.extend((answer.choices[0].message.content or "", streamed))
        return original(task, model, port, **options)

    original = evaluate.evaluate
    monkeypatch.setattr(evaluate, "evaluate", ask_first)
    arguments = [str(FP8), "--task", str(CHECKPOINTS / "held_out.yaml"), "-o", str(tmp_path)]
    limits = ["--limit", str(NUM_PROMPTS), f"--serve-options={OPTIONS}"]
    assert cli.main(["eval", *arguments, *limits]) == 0
    assert asked == ["lamp chair rose", "lamp chair rose"]

    (row,) = json.loads((tmp_path / "eval.json").read_text())["rows"]
    assert (row["prompts"], row["recovery"]) == (NUM_PROMPTS, 1.0)
    assert row["accuracy"] >= 0.9
    assert 1 < row["steps_per_block"] < 4
    assert 0 < row["tokens"] <= NUM_PROMPTS * 256
    # More than half of the bf16 one: what is not quantised is there, too.
    plain_bytes = (CHECKPOINT / "model.safetensors").stat().st_size
    assert 0.5 * plain_bytes < row["weight_bytes"] < 0.67 * plain_bytes
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
