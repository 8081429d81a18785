"""Gated self-conditioning: the previous step's prediction, fed back into the canvas embeddings."""

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.layers.layernorm import RMSNorm


class SelfConditioning(nn.Module):
    """Computes `post_norm(e + down(gelu_tanh(gate(u)) * up(u)))` with `u = pre_norm(soft)`.

    Source: transformers' `DiffusionGemmaSelfConditioning`. `post_norm` has no weight and changes
    embeddings even for a zero signal, so prefill and commit rows must not use the result.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = RMSNorm(hidden_size, eps=eps)
        self.post_norm = RMSNorm(hidden_size, eps=eps, has_weight=False)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(
        self,
        inputs_embeds: torch.Tensor,  # [rows, H], scaled token embeddings of the canvas
        soft_embeds: torch.Tensor,  # [rows, H], zero on a canvas' first step
    ) -> torch.Tensor:
        """Returns the conditioned embeddings [rows, H]."""
        signal = self.pre_norm(soft_embeds)
        gated = F.gelu(self.gate_proj(signal), approximate="tanh") * self.up_proj(signal)
        return self.post_norm(inputs_embeds + self.down_proj(gated))
