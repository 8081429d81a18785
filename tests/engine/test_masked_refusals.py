"""What masked models refuse: requests, servers, and checkpoints of other variants."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from tests.engine.masked_requests import GetMade
from vllm_dllm import plugin

SDAR, LLADA2, MOVING, NEMOTRON, FAST_DLLM = "SDAR", "LLaDA2", "LLaDA2.2", "Nemotron", "Fast-dLLM"


def ours(**settings: Any) -> dict[str, Any]:
    """An option of vLLM."""
    return {"additional_config": {"vllm_dllm": settings}}


BAD_MASK = "mask_token_id in .*config.json must be"
CONNECTOR = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
NARROW = {"max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("family", "options", "error"),
    [
        (SDAR, {"hf_overrides": {"mask_token_id": 9999}}, BAD_MASK),
        (SDAR, {"block_size": 48}, "--block-size must be a multiple of the model's block of 32"),
        (SDAR, {"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 for a .*, got 2"),
        (SDAR, NARROW, "must be at least the canvas length"),
        (
            SDAR,
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            "speculative_config is not possible with a diffusion model, got 'ngram",
        ),
        (SDAR, {"kv_transfer_config": CONNECTOR}, "cannot be served with --kv-transfer-config"),
        (SDAR, {"kv_offloading_size": 1.0}, "cannot be served with --kv-offloading-size"),
        (SDAR, {"diffusion_config": {"max_denoising_steps": 2}}, "is not for masked models, got 2"),
        (SDAR, ours(commit_last_block=True), "commit_last_block is not for masked models"),
        (SDAR, ours(defaults={"diffusion_t_min": 0.4}), "diffusion_t_min"),
        (FAST_DLLM, {"hf_overrides": {"mask_token_id": -1}}, BAD_MASK),
        (
            FAST_DLLM,
            {"block_size": 48},
            r"the model's block of 32 tokens \(bd_size in config.json\), got 48",
        ),
        (FAST_DLLM, ours(blocks_in_flight=2), "blocks_in_flight must be 1 for this"),
        (NEMOTRON, ours(blocks_in_flight=2), "blocks_in_flight must be 1 for this"),
        (
            NEMOTRON,
            {"hf_overrides": {"dlm_paradigm": "block_diff"}},
            "dlm_paradigm in .*config.json must be 'bidirectional', got 'block_diff'",
        ),
        (
            MOVING,
            {"hf_overrides": {"split_token_id": None}},
            r"delete_token_id and split_token_id in .*config.json must be two tokens from 0 to \d+ "
            r"\(vocab_size\) that are not the mask, got \d+ and None",
        ),
        (
            MOVING,
            {"hf_overrides": {"delete_token_id": 10**6}},
            "must be two tokens from 0 to .* 1000000",
        ),
        (
            MOVING,
            {"diffusion_config": {"canvas_length": 6}},
            "canvas_length in --diffusion-config must be a multiple of the 32 tokens",
        ),
        (
            MOVING,
            {
                "data_parallel_size": 2,
                "hf_overrides": {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "format": "float-quantized",
                        "config_groups": {},
                    }
                },
            },
            "data_parallel_size must be 1 for this model with quantised experts on CPUs, got 2",
        ),
    ],
)
def test_refused_servers(made: GetMade, family: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        config_of(made(family, 32).checkpoint, options)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        (SDAR, "use_sliding_window", True),
        (SDAR, "use_regular_causal", True),  # I-DLM
        (LLADA2, "use_sliding_window", True),
        (LLADA2, "score_function", "softmax"),
        (LLADA2, "norm_head", True),
        (LLADA2, "image_token_offset", 512),
        (NEMOTRON, "dlm_type", "dream"),
    ],
)
def test_refused_variants(made: GetMade, family: str, key: str, value: Any) -> None:
    error = rf"{key} in .*config.json must be .*, got {value!r}: checkpoints of other variants"
    with pytest.raises(ValueError, match=error):
        config_of(made(family, 32).checkpoint, {"hf_overrides": {key: value}})


def test_cached_pages_of_any_size(made: GetMade) -> None:
    """Nemotron's known tokens are causal, so a part of a block may be cached."""
    assert (
        config_of(made(NEMOTRON, 32).checkpoint, {"block_size": 48}).cache_config.block_size == 48
    )


def config_of(path: Path, options: dict[str, Any]) -> Any:
    plugin.register()
    options = {"dtype": "float32", "max_model_len": 512, **options}
    return EngineArgs(str(path), **options).create_engine_config()
