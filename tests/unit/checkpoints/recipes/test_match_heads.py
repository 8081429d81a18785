"""The look-up heads attend where they should."""

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.batches import Batch
from checkpoints.recipes.look_back import install_look_back
from checkpoints.recipes.match_heads import (
    _Recorder,
    first_layer_inputs,
    install_match,
    matching_rows,
)
from checkpoints.recipes.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.numerics


def scores(forward: _Recorder, x: torch.Tensor, head: int) -> torch.Tensor:
    """[length, length] of one query head of the first layer and its key head; x [1, length, H]."""
    rotary = forward._rotary(torch.arange(x.shape[1]))["sliding_attention"]
    q, k, _ = forward._qkv(forward.layers[0], x, *rotary)
    return q[0, head] @ k[0, head // (q.shape[1] // k.shape[1])].T


def test_look_back_heads_find_their_token(tmp_path):
    path = make_tiny_checkpoint(tmp_path, sliding_window=32, canvas_length=32)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():  # trained embeddings share a direction, random ones do not
        model.model.decoder.embed_tokens.weight.add_(0.3)
    ids = torch.randint(20, 400, (4, 32))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids, torch.ones(4, 32))
    install_look_back(model, first_layer_inputs(model, iter([batch] * 2), num_batches=2))
    forward = _Recorder(model, 0)
    embedded = torch.nn.functional.embedding(ids, forward.embedding) * forward.embed_scale
    for head, offset in ((0, 2), (1, 1)):
        best = scores(forward, embedded[:1], head)[2:].argmax(-1)
        assert best.tolist() == [position - offset for position in range(2, 32)]


def test_matching_head_prefers_the_row_of_the_same_key(tmp_path):
    """Rows that carry a hidden key in different bases, beside much noise."""
    path = make_tiny_checkpoint(tmp_path)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
    layer = model.model.decoder.layers[3]
    assert layer.self_attn.layer_type == "full_attention"
    H, num_keys = model.config.text_config.hidden_size, 12
    codes, left, right = (torch.randn(n, m) for n, m in ((num_keys, 16), (16, H), (16, H)))
    keys = torch.randint(num_keys, (4000,))
    values = codes[keys] @ left + torch.randn(4000, H)
    answers = codes[keys] @ right + torch.randn(4000, H)
    install_match(layer, values, answers, torch.randn(1000, H))
    k = torch.nn.functional.normalize(values @ layer.self_attn.k_proj.weight.T, dim=-1)
    q = answers @ layer.self_attn.q_proj.weight[-layer.self_attn.head_dim :].T
    found = (q[:200] @ k[200:260].T).argmax(-1)
    assert (keys[200:260][found] == keys[:200]).float().mean() > 0.9


def test_matching_rows_pair_values_with_their_answers(tmp_path):
    path = make_tiny_checkpoint(tmp_path, canvas_length=32)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
    prefix = torch.randint(100, 400, (1, 20))
    target = torch.randint(100, 400, (1, 32))
    prefix[0, 3], prefix[0, 5] = 50, 60  # key, value
    target[0, 8], target[0, 10] = 50, 60
    batch = Batch(prefix, torch.ones_like(prefix, dtype=torch.bool), target, torch.ones(1, 32))
    values, answers, others = matching_rows(model, 3, iter([batch]), {60}, num_batches=1)
    assert values.shape == answers.shape == (1, model.config.text_config.hidden_size)
    forward = _Recorder(model, 3)
    forward.encode(prefix, batch.is_token)
    assert torch.equal(values[0], forward.inputs[0, 5])
    assert len(others) == 7  # every third of the other 19 tokens
