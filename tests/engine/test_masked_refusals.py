"""What masked models refuse: requests, servers, and checkpoints of other variants."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from tests.engine.conftest import Engine
from tests.engine.masked import make_checkpoint
from vllm_dllm import plugin

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    @cache
    def make(*case: Any) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("masked"), *case)[0]

    return make


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"extra_args": {"diffusion_t_min": 0.4, "diffusion_t_max": 0.8}}, "diffusion_t_min"),
        ({"extra_args": {"diffusion_read_only": 1}}, "diffusion_read_only is not for masked"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not possible"),
    ],
)
def test_refused_requests(
    engine: Callable[..., Engine], checkpoint: Checkpoint, options: dict[str, Any], error: str
) -> None:
    model = engine(checkpoint(32), max_model_len=110, block_size=32)
    with pytest.raises(VLLMValidationError, match=error):
        model.llm.generate([{"prompt_token_ids": [1]}], SamplingParams(**options), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hf_overrides": {"mask_token_id": 9999}}, "mask_token_id in .*config.json must be"),
        ({"block_size": 48}, "--block-size must be a multiple of the model's block of 32"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, "must be at least the canvas length"),
        (
            {"additional_config": {"vllm_dllm": {"commit_last_block": True}}},
            "commit_last_block is not for masked models",
        ),
        (
            {"additional_config": {"vllm_dllm": {"defaults": {"diffusion_t_min": 0.4}}}},
            "diffusion_t_min",
        ),
    ],
)
def test_refused_servers(checkpoint: Checkpoint, options: dict[str, Any], error: str) -> None:
    assert_refused(checkpoint(32), options, error)


@pytest.mark.parametrize(
    "architecture", ["NemotronLabsDiffusionModel", "Fast_dLLM_QwenForCausalLM"]
)
def test_blocks_whose_first_token_is_foretold_are_not_in_flight(
    checkpoint: Checkpoint, architecture: str
) -> None:
    options = {"additional_config": {"vllm_dllm": {"blocks_in_flight": 2}}}
    assert_refused(checkpoint(32, architecture), options, "blocks_in_flight must be 1 for this")


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("SDARForCausalLM", "use_sliding_window", True),
        ("LLaDA2MoeModelLM", "use_sliding_window", True),
        ("LLaDA2MoeModelLM", "score_function", "softmax"),
        ("LLaDA2MoeModelLM", "norm_head", True),
        ("LLaDA2MoeModelLM", "image_token_offset", 512),
    ],
)
def test_refused_variants(checkpoint: Checkpoint, architecture: str, key: str, value: Any) -> None:
    """Other layers, LLaDA2.0-Uni's tokens of images."""
    error = rf"{key} in .*config.json must be .*, got {value!r}: checkpoints of other variants"
    assert_refused(checkpoint(4, architecture), {"hf_overrides": {key: value}}, error)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"hf_overrides": {"split_token_id": None}},
            r"delete_token_id and split_token_id in .*config.json must be two tokens from 0 to \d+ "
            r"\(vocab_size\) that are not the mask, got \d+ and None",
        ),
        ({"hf_overrides": {"delete_token_id": 10**6}}, "must be two tokens from 0 to .* 1000000"),
        (
            {"diffusion_config": {"canvas_length": 6}},
            "canvas_length in --diffusion-config must be a multiple of the 4 tokens",
        ),
    ],
)
def test_refused_variants_of_blocks_that_move(
    checkpoint: Checkpoint, options: dict[str, Any], error: str
) -> None:
    assert_refused(checkpoint(4, "LLaDA2.2"), options, error)


def assert_refused(path: Path, options: dict[str, Any], error: str) -> None:
    plugin.register()
    with pytest.raises(ValueError, match=error):
        EngineArgs(
            str(path), **{"dtype": "float32", "max_model_len": 512, **options}
        ).create_engine_config()
