"""Muon for all weight matrices, AdamW for the rest, as one step.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
matrix by the nearest orthogonal one. torch.optim.Muon takes 2D matrices one at a time; ours are
small and many, and experts are 3D, so equal shapes are stacked and orthogonalised together. The
update is scaled to the size of an AdamW update (arXiv:2502.16982, eq. 4), so one learning rate
serves both.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on [N, rows, columns]: singular values go to about one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonAdamW:
    """Matrices (except embeddings) by Muon, vectors and embeddings by AdamW."""

    def __init__(
        self,
        model: nn.Module,
        *,
        muon_lr: float,
        adam_lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ):
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.weight_decay, self.momentum = weight_decay, momentum
        self.matrices: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        rest = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dim() >= 2 and "embed_tokens" not in name and "router" not in name:
                self.matrices[parameter.shape[-2:]].append(parameter)
            else:
                rest.append(parameter)
        self.buffers = {p: torch.zeros_like(p) for group in self.matrices.values() for p in group}
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)

    def state(self) -> dict[str, Any]:
        """What a later run needs to continue; refers to the optimiser's own tensors."""
        return {"buffers": list(self.buffers.values()), "adam": self.adam.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        for buffer, value in zip(self.buffers.values(), state["buffers"], strict=True):
            buffer.copy_(value)
        self.adam.load_state_dict(state["adam"])

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both learning rates multiplied by `scale`; clears the gradients."""
        lr = self.muon_lr * scale
        for (rows, columns), group in self.matrices.items():
            group = [p for p in group if p.grad is not None]
            for p in group:
                self.buffers[p].lerp_(p.grad, 1 - self.momentum)
            nesterov = [p.grad.lerp(self.buffers[p], self.momentum) for p in group]
            stacked = torch.cat([g.reshape(-1, rows, columns) for g in nesterov])
            update = orthogonalize(stacked) * (0.2 * max(rows, columns) ** 0.5)
            parts = update.split([g.numel() // (rows * columns) for g in nesterov])
            for p, part in zip(group, parts, strict=True):
                p.mul_(1 - lr * self.weight_decay).add_(part.view_as(p), alpha=-lr)
                p.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad()
