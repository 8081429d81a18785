"""`vllm-dllm eval` of the shipped quantised checkpoints, and an OpenAI client beside it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.server.conftest import CANVAS, CHECKPOINT, UNCOMPILED
from vllm_dllm import cli
from vllm_dllm.tools import evaluate
from vllm_dllm.tools.evaluate.harness import Outcome

CHECKPOINTS = CHECKPOINT.parent
FP8 = CHECKPOINTS / "diffusiongemma-tiny-FP8-dynamic"
NVFP4 = CHECKPOINTS / "diffusiongemma-tiny-NVFP4"
SMALL = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "1G")
OPTIONS = shlex.join((*UNCOMPILED, *SMALL))
NUM_PROMPTS = 4


def test_a_masked_checkpoint(tmp_path: Path) -> None:
    """In blocks of 4, as its config.json says, and in bf16, in which a step of requests that do not
    lie side by side once ended the worker."""
    options = shlex.join(("--enforce-eager", *SMALL))
    task = ["--task", str(CHECKPOINTS / "held_out.yaml"), "-o", str(tmp_path)]
    limits = ["--limit", "24", "--concurrency", "8", f"--serve-options={options}"]
    assert cli.main(["eval", str(CHECKPOINTS / "sdar-tiny"), *task, *limits]) == 0
    (row,) = json.loads((tmp_path / "eval.json").read_text())["rows"]
    assert row["prompts"] == 24
    assert row["accuracy"] >= 0.9
    assert 1 <= row["steps_per_block"] <= 4


@pytest.mark.parametrize(
    "checkpoints", [[NVFP4], pytest.param([FP8, NVFP4], marks=pytest.mark.thorough)], ids=len
)
def test_quantised_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: list[Path]
) -> None:
    """Through the harness, and in the same servers chat and a stream of a client."""
    asked: list[str] = []

    def ask_first(task: Any, model: str, port: int, *asking: Any, **options: Any) -> Outcome:
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
        return original(task, model, port, *asking, **options)

    original = evaluate.evaluate
    monkeypatch.setattr(evaluate, "evaluate", ask_first)
    task = ["--task", str(CHECKPOINTS / "held_out.yaml"), "-o", str(tmp_path)]
    limits = ["--limit", str(NUM_PROMPTS), f"--serve-options={OPTIONS}"]
    assert cli.main(["eval", *map(str, checkpoints), *task, *limits]) == 0
    assert asked == 2 * len(checkpoints) * ["lamp chair rose"]

    rows = json.loads((tmp_path / "eval.json").read_text())["rows"]
    assert [row["checkpoint"] for row in rows] == list(map(str, checkpoints))
    plain_bytes = (CHECKPOINT / "model.safetensors").stat().st_size
    for row in rows:
        assert row["prompts"] == NUM_PROMPTS
        assert row["accuracy"] >= 0.9
        assert 1 < row["steps_per_block"] < 4
        assert 0 < row["tokens"] <= NUM_PROMPTS * 256
        assert 0.28 * plain_bytes < row["weight_bytes"] < 0.67 * plain_bytes
    assert rows[0]["recovery"] == 1.0
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
