"""Attention heads that a look-up needs, set before training, which does not find them in time.

To look a key up, a value of the document must know the key two tokens before it, an answer must
know the key it has just written, and a head must match the two. None helps without the others, so a
small model guesses among the document's values for thousands of steps (as `checkpoints/recipes/
match_heads.py` found for diffusion). Here random weights get all three: layer 0 looks one and two
tokens back, layer 1 matches. They are a start, in the manner of mimetic initialization (Trockman
and Kolter, arXiv:2305.09828); training may change them like everything else.
"""

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from checkpoints.recipes.look_back import PATTERN, rotate

OFFSETS = (1, 2)  # how many tokens the first two heads of the first layer look back
SHARPNESS = 1.5  # weight of the query and key norms in both layers
KEPT_SIZE = 8.0  # of query and key weights: their norms undo it, but updates have less effect
CARRIED_SIZE = 0.6  # of what the look-back heads write: above what else is in those directions
SLOW_FREQUENCIES = 8  # of a head, from the slowest: rotation hardly turns them within a document


@torch.no_grad()
def install_look_up(model: Qwen3ForCausalLM) -> None:
    """Overwrites the first heads of layers 0 and 1, and adds a constant to all embeddings."""
    config = model.config
    D, H = config.head_dim, config.hidden_size
    embedding = model.get_input_embeddings().weight
    # Linears have no bias; a constant part of every embedding is read out instead.
    constant = torch.randn(H).sign()
    embedding += embedding.std() * constant
    normed = embedding * embedding.square().mean(-1, keepdim=True).rsqrt()
    readout = constant / (normed @ constant).mean()

    look, match = (layer.self_attn for layer in model.model.layers[:2])
    for attention in (look, match):
        attention.q_norm.weight.fill_(SHARPNESS)
        attention.k_norm.weight.fill_(SHARPNESS)
    pattern = torch.zeros(D)
    pattern[: len(PATTERN)] = torch.tensor(PATTERN)
    inv_freq = model.model.rotary_emb.inv_freq
    look.k_proj.weight[:D] = KEPT_SIZE * torch.outer(pattern, readout)
    for head, offset in enumerate(OFFSETS):
        query = rotate(pattern, inv_freq, -offset)
        look.q_proj.weight[head * D : (head + 1) * D] = KEPT_SIZE * torch.outer(query, readout)
    # What the heads carry: a random view of the token they look at, without the constant part;
    # each head writes it to its own directions.
    view = _orthonormal_to(constant, D)
    look.v_proj.weight[:D] = view.T
    written = _orthonormal_to(constant, len(OFFSETS) * D)
    look.o_proj.weight[:, : len(OFFSETS) * D] = CARRIED_SIZE * written

    one_back, two_back = written[:, :D], written[:, D : 2 * D]
    slow = torch.cat(
        [torch.arange(D // 2 - SLOW_FREQUENCIES, D // 2) + half for half in (0, D // 2)]
    )
    queries_per_key = config.num_attention_heads // config.num_key_value_heads
    # Each key head matches another part of the view.
    for head, part in enumerate(torch.arange(D).split(len(slow))[: config.num_key_value_heads]):
        keys, queries = torch.zeros(D, H), torch.zeros(D, H)
        keys[slow], queries[slow] = two_back.T[part], one_back.T[part]
        start = head * queries_per_key * D
        match.k_proj.weight[head * D : (head + 1) * D] = 2 * keys
        match.q_proj.weight[start : start + D] = 2 * queries


def _orthonormal_to(vector: Tensor, count: int) -> Tensor:
    """[H, count] random orthonormal columns, orthogonal to vector [H]."""
    columns = torch.cat((vector[:, None], torch.randn(len(vector), count)), dim=1)
    return torch.linalg.qr(columns)[0][:, 1:]
