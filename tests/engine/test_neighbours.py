"""An ordinary model is served by an installation with this extension as by one without it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.processes import output_of

PROGRAM = Path(__file__).with_name("serve_qwen.py")
NEITHER = ("KMP_BLOCKTIME", "GOMP_SPINCOUNT", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights of unit gain, so that its logits are not all alike."""
    path = tmp_path_factory.mktemp("qwen")
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(path)
    return path


def serve(checkpoint: Path, *runs: str, plugins: str) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name not in NEITHER}
    env |= {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    said = output_of(PROGRAM, checkpoint, *runs, env=env)
    result = next(line for line in said.splitlines() if line.startswith("RESULT"))
    return json.loads(result.removeprefix("RESULT"))


@pytest.fixture(scope="module")
def without(qwen: Path) -> dict[str, Any]:
    return serve(qwen, "default", plugins="")


@pytest.fixture(scope="module")
def with_extension(qwen: Path) -> dict[str, Any]:
    return serve(qwen, "default", "v2", plugins="vllm_dllm")


def test_default_runner_is_untouched(without: dict, with_extension: dict) -> None:
    assert with_extension["default"] == without["default"]
    # The comparison means something: this is a plain CPU, where vLLM's own overrides are at work.
    process = without["default"]["process"]
    assert process["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert process["has_triton"] is False
    assert process["runner v1 kernel"] == "KernelOverride"
    assert process["runner v2 kernel"] == "function"


def test_runner_v2_gives_the_same_greedy_tokens(without: dict, with_extension: dict) -> None:
    """Stock vLLM refuses runner v2 on this machine, so its runner v1 is what to compare with."""
    v2 = with_extension["v2"]
    assert v2["process"]["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert v2["process"]["worker"] == "vllm_dllm.cpu.worker.TritonFreeCPUWorker"
    assert v2["tokens"] == without["default"]["tokens"]
