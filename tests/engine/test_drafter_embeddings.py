"""A drafter without embeddings of its own sees tokens as its target does."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from tests.engine.drafters import ask, started
from tests.engine.one_step import is_best_guess
from vllm_dllm.tools.drafter.blocks import block_logits, make_blocks
from vllm_dllm.tools.drafter.reference import (
    DFlashDrafter,
    load_drafter,
    load_target,
    make_drafter_config,
    save_drafter,
)

pytestmark = [pytest.mark.numerics, pytest.mark.slow]


@pytest.fixture
def gemma_pair(tmp_path: Path) -> tuple[Path, Path]:
    """A Gemma 4 target, whose embeddings are scaled and whose layers differ, and a drafter as
    `drafter train` begins with, both with random weights."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        initializer_range=0.08,
    )
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    Gemma4ForCausalLM(config).save_pretrained(target)
    layout = {"num_layers": 2, "target_layer_ids": [1, 3, 4], "mask_token_id": 4, "block_size": 8}
    random = DFlashDrafter(make_drafter_config(config, **layout))
    for weight in random.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.15)  # else every guess is the mask itself
    save_drafter(random, drafter, torch.float32)
    return target, drafter


def test_a_gemma_target_scales_its_drafters_embeddings(gemma_pair: tuple[Path, Path]) -> None:
    """As z-lab's code does, which embeds a block by the target's module."""
    path, drafter_path = gemma_pair
    prompts = [list(range(10, 10 + length)) for length in (12, 90)]
    speculative = {"method": "dflash", "model": str(drafter_path), "num_speculative_tokens": 7}
    engine = {"model": str(path), "max_model_len": 256, "speculative_config": speculative}
    with started(engine) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        speculator, drafts = worker.model_runner.speculator, []
        propose = speculator.propose
        speculator.propose = lambda *a, **k: drafts.append(propose(*a, **k).clone()) or drafts[-1]
        sampling = {"temperature": 0.0, "max_tokens": 20}
        answers = ask(llm, prompts, sampling).tokens
    target, drafter = load_target(path, "cpu"), load_drafter(drafter_path)
    for prompt, answer, row in zip(prompts, answers, drafts[0].tolist(), strict=True):
        tokens = torch.tensor([prompt + answer[:1] + row])
        width = torch.tensor([[8]])
        with torch.no_grad():
            states, _ = target.states(tokens, drafter.target_layer_ids)
            lengths, anchor = torch.tensor([tokens.shape[1]]), torch.tensor([[len(prompt)]])
            blocks = make_blocks(tokens, lengths, anchor, width, 8, drafter.mask_token_id)
            guesses = block_logits(drafter, target, states, blocks)[0, 1:].log_softmax(-1)
        assert all(is_best_guess(*each) for each in zip(row, guesses, strict=True))
