"""The matching heads of an autoregressive model, moved on by a position for a masked one.

An autoregressive look-up (`target_heads.py`) is asked from the token before a value: the key is one
token back. A masked model is asked from the value's own position: the key is two tokens back.
Training alone did not move the heads in 1,200 steps. Moved by hand, they look at the right value in
three of four look-ups before the first step.
"""

import torch
from transformers import Qwen3ForCausalLM


@torch.no_grad()
def ask_from_the_next_position(model: Qwen3ForCausalLM) -> None:
    """The queries of layer 1 read what layer 0's second head wrote, the token two back, in place of
    what its first head wrote, the token one back."""
    config = model.config
    D = config.head_dim
    look, match = (layer.self_attn for layer in model.model.layers[:2])
    one_back, two_back = look.o_proj.weight[:, : 2 * D].split(D, dim=1)  # [H, D] each
    moved = torch.linalg.pinv(two_back) - torch.linalg.pinv(one_back)  # [D, H]
    queries_per_key = config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_key_value_heads):
        start = head * queries_per_key * D
        query = match.q_proj.weight[start : start + D]
        query += query @ one_back @ moved
