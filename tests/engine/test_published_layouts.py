"""Checkpoints that are published under names of their own, in a family's layout: with the keys of
their config.json, and made-up weights of small sizes, they decode as the family's loop does."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from tests import tolerances
from tests.engine.conftest import GetEngine
from tests.engine.levenshtein import LevenshteinReference
from tests.engine.masked import Reference, Rule, build, likes_to_move, published_weights, randomize
from tests.engine.masked_requests import generate, params_of, prompts_of
from tests.engine.test_masked import blocks_decided_alike
from vllm_dllm import plugin

pytestmark = pytest.mark.numerics

# As in mbd_lm/configs/model_configs/sdar_8B of github.com/SJTU-DENG-Lab/mbd-lms, which also trains
# from SDAR. TraDo is trained from it, too, and served by the same code.
SDAR = {
    "architectures": ["SDARForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "fuse_cross_entropy": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "sdar",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# As in configs/model_configs of github.com/inclusionAI/dFactory, with the type of a checkpoint
# whose experts are not merged.
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "model_type": "llada2_moe",
    "norm_topk_prob": True,
    "norm_head": False,
    "rope_theta": 600000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_rmsnorm": True,
    "rms_norm_eps": 1e-06,
    "num_shared_experts": 1,
    "use_cache": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "norm_softmax": False,
    "output_dropout": 0.0,
    "vocab_size": 157184,
    "using_split_qkv_in_self_attention": False,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "score_function": "sigmoid",
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "sliding_window": 4096,  # of LLaDA2.0-flash-CAP, and not used
    "use_sliding_window": False,
}
# As saved by the checkpoints' own class, in tests/fixtures/tiny of github.com/coder543/minnow, with
# the tokens that the modelling file has.
LLADA22 = LLADA2 | {
    "block_size": 32,
    "delete_token_id": 156930,
    "split_token_id": 156931,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 3000000,
        "rope_type": "default",
    },
    "rope_theta": 3000000,
    "transformers_version": "5.2.0",
    "use_qk_norm": True,
}
NUM_TOKENS = 36
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SMALL_EXPERTS = SMALL | {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "rotary_dim": 16,
}


EDIT_TOKENS = ("delete_token_id", "split_token_id")


class Layout(NamedTuple):
    config: dict[str, Any]
    block_length: int
    mask_id: int  # config.json says neither
    rule: Rule
    options: Mapping[str, Any] = MappingProxyType({})


PUBLISHED = {
    "Gen-Verse/TraDo-8B-Thinking": Layout(SDAR | SMALL, 4, 151669, Rule(threshold=0.9)),
    "SJTU-DENG-Lab/MBD-Math-SDAR-8B-Chat-b32": Layout(
        SDAR | SMALL, 32, 151669, Rule(threshold=0.95), {"hf_overrides": {"block_size": 32}}
    ),
    # inclusionAI's, and SJTU-DENG-Lab's that is trained from LLaDA2.0-mini and has its config.json.
    "LLaDA2.0-mini-CAP and MBD-LLaDA2-mini": Layout(
        LLADA2 | SMALL_EXPERTS, 32, 156895, Rule(threshold=0.95)
    ),
    "inclusionAI/LLaDA2.2-mini": Layout(
        LLADA22 | SMALL_EXPERTS | {"expert_capacity": 6}, 32, 156895, Rule(threshold=0.5, edit=0.0)
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_decisions(engine: GetEngine, tmp_path: Path, name: str) -> None:
    layout = PUBLISHED[name]
    architecture = layout.config["architectures"][0]
    with torch.no_grad():
        model = build(architecture, layout.config).eval()
        randomize(model, layout.mask_id)
        moving = tuple(layout.config[key] for key in EDIT_TOKENS if key in layout.config)
        if moving:
            # These two, of very many.
            likes_to_move(model, layout.mask_id, *moving, deviation=30.0, seed=3)
        else:
            model.lm_head.weight.mul_(4.0)  # some tokens are likely, of very many
    weights = published_weights(model, architecture)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(layout.config))
    served = engine(
        tmp_path, block_size=32, max_model_len=512, skip_tokenizer_init=True, **layout.options
    )
    kind = LevenshteinReference if moving else Reference
    decode = kind(model, layout.block_length, layout.mask_id)
    rule, prompts = layout.rule, prompts_of(layout.block_length)[::3]
    params = [params_of(rule, NUM_TOKENS, seed) for seed in range(len(prompts))]
    if moving:  # what is published is what is left out
        for each in params:
            each.extra_args = None
    same = total = steps = 0
    found = generate(served, prompts, params)
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        theirs = partial(decode.generate, prompt, NUM_TOKENS, rule, seed)
        same += blocks_decided_alike(ours, theirs, decode)
        total += sum(step.finished for step in ours.steps)
        steps += len(ours.steps)
    assert same >= total * tolerances.DECIDED
    if isinstance(decode, LevenshteinReference):
        assert decode.happened["deleted"] and decode.happened["inserted"]
    else:
        assert steps < NUM_TOKENS * len(prompts), "some steps reveal several tokens"


def test_the_context_is_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLADA22 | SMALL_EXPERTS))
    plugin.register()
    made = EngineArgs(str(tmp_path), skip_tokenizer_init=True, load_format="dummy")
    assert made.create_engine_config().model_config.max_model_len == 131072
