"""The small masked model: what it is trained on, and that training asks what decoding asks."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from checkpoints.recipes import train_masked
from checkpoints.recipes.masked_batches import (
    BLOCK_LENGTHS,
    MASK_TOKEN,
    PADDING_WEIGHT,
    collate,
    masked_batches,
)
from checkpoints.recipes.run_log import earlier_log
from checkpoints.recipes.target_model import initialize, save_target, target_config
from checkpoints.recipes.tokenizer import EOS_ID, build_tokenizer
from checkpoints.recipes.train_masked import additive
from checkpoints.recipes.train_target import LAST_SHARES
from tests import tolerances
from tests.engine.masked import Reference

pytestmark = pytest.mark.numerics
MASK_ID = 497


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def small(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        target_config(len(tokenizer), hidden_size=128, intermediate_size=64, num_layers=2)
    )
    initialize(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize("block_length", BLOCK_LENGTHS)
def test_training_sees_what_decoding_sees(
    tokenizer: PreTrainedTokenizerFast, block_length: int
) -> None:
    """Each block with masks behind the clean ones before it, as in a step of the published loop."""
    model = small(tokenizer)
    decode = Reference(model, block_length, MASK_ID)
    rng = random.Random(0)
    lengths = [(block_length - 1, 3), (2 * block_length, block_length), (5, 2 * block_length + 2)]
    rows = [
        (
            "any",
            [rng.randrange(2, 400) for _ in range(p)],
            [*rng.choices(range(2, 400), k=a), EOS_ID],
        )
        for p, a in lengths
    ]
    batch = collate(rows, block_length, MASK_ID, rng)
    hidden = model.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=additive(batch.visible),
    ).last_hidden_state
    logits = model.lm_head(hidden)
    for row, (_, prompt, answer) in enumerate(rows):
        start = len(prompt) // block_length * block_length
        clean_length = -(-(len(prompt) + len(answer)) // block_length) * block_length
        clean = batch.tokens[row, :clean_length].tolist()
        assert clean[: len(prompt) + len(answer)] == prompt + answer
        assert set(clean[len(prompt) + len(answer) :]) <= {EOS_ID}
        for block in range(start, clean_length, block_length):
            own = slice(clean_length + block - start, clean_length + block - start + block_length)
            shown = batch.tokens[row, own].tolist()
            expected = decode.logits(clean[:block] + shown)[block:]
            largest = expected.abs().max().item()
            allowed = tolerances.model(layers=2, width=128, logits=largest)
            tolerances.assert_within(logits[row, own], expected, allowed)
            asked = batch.weight[row, own] > 0
            assert asked.any() == any(i >= len(prompt) for i in range(block, block + block_length))
            assert [token == MASK_ID for token in shown] == asked.tolist()
            assert batch.target[row, own].tolist() == clean[block : block + block_length]


def test_batches_weigh_what_is_hidden(tokenizer: PreTrainedTokenizerFast) -> None:
    batches = masked_batches(tokenizer, LAST_SHARES, mask_id=MASK_ID, seed=0, tokens_per_batch=1024)
    tasks: set[str] = set()
    for batch in itertools.islice(batches, 40):
        tasks |= set(batch.tasks)
        hidden = batch.weight > 0
        assert ((batch.tokens == MASK_ID) == hidden).all()
        assert (hidden.sum(-1) > 0).all()
        heaviest = batch.weight.amax(-1, keepdim=True)
        light = hidden & (batch.weight < heaviest)
        assert (batch.target[light] == EOS_ID).all()
        assert (batch.weight[light] == (PADDING_WEIGHT * heaviest).expand_as(hidden)[light]).all()
    assert tasks == set(LAST_SHARES)


@pytest.mark.slow
def test_a_short_run(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss falls, and what is written is a checkpoint of SDAR's."""
    save_target(small(tokenizer), tokenizer, tmp_path / "init", torch.float32)
    out = tmp_path / "out"
    options = ["--init-from", str(tmp_path / "init"), "--out", str(out), "--steps", "24"]
    options += ["--tokens", "512", "--log-every", "6"]
    monkeypatch.setattr("sys.argv", ["train_masked", *options])
    train_masked.main()
    losses = [entry["loss"] for entry in earlier_log(out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["SDARForCausalLM"]
    assert (config["model_type"], config["block_size"]) == ("sdar", 4)
    assert config["mask_token_id"] == tokenizer.convert_tokens_to_ids(MASK_TOKEN) == MASK_ID
    assert (out / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
