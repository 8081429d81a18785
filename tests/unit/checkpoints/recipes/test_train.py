"""A few training steps on a tiny model lower the loss and keep it finite."""

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.batches import encode_canvases, training_batches
from checkpoints.recipes.forward import TrainingForward
from checkpoints.recipes.muon import MuonAdamW, orthogonalize
from checkpoints.recipes.tasks import Example
from checkpoints.recipes.tiny import make_tiny_checkpoint
from checkpoints.recipes.tokenizer import EOS_ID, build_tokenizer
from checkpoints.recipes.train import diffusion_loss, initialize

pytestmark = pytest.mark.numerics


def test_loss_falls(tmp_path):
    torch.manual_seed(0)
    path = make_tiny_checkpoint(tmp_path, canvas_length=64)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
    initialize(model)
    model.model.encoder.vision_tower.requires_grad_(False)
    model.model.encoder.embed_vision.requires_grad_(False)
    forward = TrainingForward(model)
    optimizer = MuonAdamW(model, muon_lr=5e-3, adam_lr=3e-3, weight_decay=0.0)
    batches = training_batches(
        build_tokenizer(),
        {"sort": 1.0},
        seed=0,
        canvas_length=64,
        canvases_per_prefix=2,
        tokens_per_batch=1024,
    )
    losses = []
    for _ in range(12):
        loss, right = diffusion_loss(forward, next(batches), copies=2)
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
        assert torch.isfinite(loss) and 0.0 <= right <= 1.0
    assert sum(losses[-3:]) < sum(losses[:3]) - 1.5


def test_long_answers_become_blocks():
    tokenizer = build_tokenizer()
    answer = " ".join(map(str, range(10, 60)))  # 149 tokens and EOS
    rows = encode_canvases(tokenizer, Example("count_up", "Count from 10 to 59.", answer), 64)
    assert len(rows) == 3
    assert [len(canvas) for _, canvas, _ in rows] == [64, 64, 64]
    prompt = rows[0][0]
    assert rows[2][0] == prompt + rows[0][1] + rows[1][1]
    tokens = rows[0][1] + rows[1][1] + rows[2][1]
    assert tokenizer.decode(tokens[: tokens.index(EOS_ID)]) == answer
    assert set(tokens[150:]) == {EOS_ID}


def test_orthogonalize():
    torch.manual_seed(0)
    for shape in [(3, 16, 48), (3, 48, 16)]:
        singular_values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert singular_values.min() > 0.5 and singular_values.max() < 1.5
