"""LLaDA2.0 in plain PyTorch, in the names and shapes of the published checkpoints.

Legend: T tokens, D head size, E experts, G groups of them.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.expert_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weight of each expert [T, E], 0 for those that are not chosen. A group is as good as its
        two best experts; the bias takes part in the choice alone."""
        config = self.config
        scores = (x @ self.weight.T).sigmoid()
        if getattr(config, "expert_capacity", None):
            biased = self.by_blocks(scores + self.expert_bias)
        else:
            biased = self.by_groups(scores + self.expert_bias)
        chosen = biased.topk(config.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
        return torch.zeros_like(scores).scatter(1, chosen, weights)

    def by_groups(self, biased: torch.Tensor) -> torch.Tensor:
        """LLaDA2.0's and 2.1's: `biased` [T, E], -inf for experts that a row may not choose."""
        config = self.config
        biased = biased.view(len(biased), config.n_group, -1)
        best = biased.topk(2).values.sum(-1).topk(config.topk_group).indices
        allowed = torch.zeros(biased.shape[:2], dtype=torch.bool).scatter(1, best, True)
        return biased.masked_fill(~allowed[..., None], -torch.inf).flatten(1)

    def by_blocks(self, biased: torch.Tensor) -> torch.Tensor:
        """LLaDA2.2's: an expert is as good for a block as for the row that likes it best."""
        found = []
        for block in biased.split(self.config.block_size):
            best = block.amax(0).topk(self.config.expert_capacity).indices
            allowed = torch.zeros(block.shape[1], dtype=torch.bool).scatter(0, best, True)
            found.append(block.masked_fill(~allowed, -torch.inf))
        return torch.cat(found)


class MoE(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList(MLP(hidden, inner) for _ in range(config.num_experts))
        self.gate = Gate(config)
        self.shared_experts = MLP(hidden, inner * config.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x)
        routed = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (routed * weights[..., None]).sum(1) + self.shared_experts(x)


class Attention(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, heads, D = config, config.num_attention_heads, config.head_dim
        all_heads = heads + 2 * config.num_key_value_heads
        self.query_key_value = nn.Linear(config.hidden_size, all_heads * D, bias=False)
        self.query_layernorm = RMSNorm(D, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(D, config.rms_norm_eps)
        self.dense = nn.Linear(heads * D, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        config = self.config
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        D = config.head_dim
        qkv = self.query_key_value(x).view(len(x), -1, D).transpose(0, 1)  # [heads, T, D]
        query, key, value = qkv.split((heads, kv_heads, kv_heads))
        query = self.rotate(self.query_layernorm(query), position)
        key = self.rotate(self.key_layernorm(key), position)
        key, value = (t.repeat_interleave(heads // kv_heads, dim=0) for t in (key, value))
        scores = query @ key.transpose(1, 2) * D**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.dense((weights @ value).transpose(0, 1).flatten(1))

    def rotate(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rotates the first part of each head."""
        size = int(self.config.head_dim * self.config.partial_rotary_factor)
        frequency = self.config.rope_theta ** -(torch.arange(0, size, 2) / size)
        angle = position[:, None] * frequency
        first, second, rest = x.split((size // 2, size // 2, x.shape[-1] - size), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Layer(nn.Module):
    def __init__(self, config: SimpleNamespace, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_dense = index < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if is_dense else MoE(config)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), seen, position)
        return x + self.mlp(self.post_attention_layernorm(x))


class LLaDA2(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        layers = (Layer(config, i) for i in range(config.num_hidden_layers))
        self.model = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(layers),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, tokens: torch.Tensor, seen: torch.Tensor, position: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [T, V] of the tokens [T], of which row q sees key k where seen [T, T] is true.
        `position` [T]: None: as they come."""
        if position is None:
            position = torch.arange(len(tokens))
        x = self.model["word_embeddings"](tokens)
        for layer in self.model["layers"]:
            x = layer(x, seen, position)
        return self.lm_head(self.model["norm"](x))
