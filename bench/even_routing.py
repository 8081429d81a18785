"""Routing that reads the same experts in every engine.

Made-up weights route badly: a step reads about half of the experts, and not the same half in two
engines, so their times compare nothing. Here the experts of a step's rows come from one table,
drawn evenly once and for all. vLLM asks it in the place of the model's router where its variable
ROUTING says EVEN. Its own `uniform_random` draws in every layer of every step, which costs more
than the model's router does.
"""

import torch
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    RoutingSimulator,
    RoutingStrategy,
)

from bench.full_shape_engine import EVEN, ROUTING, WorkerProbe

MOST_ROWS = 1 << 16  # of a step


class EvenRouting(RoutingStrategy):
    """Row number i of any step goes to the experts of line i."""

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None  # [MOST_ROWS, K] int64
        self.called: set[int] = set()
        """Numbers of rows that layers asked for, outside of graphs and when those were captured."""

    def route_tokens(
        self,
        hidden_states: torch.Tensor,  # [N, H]
        router_logits: torch.Tensor,  # [N, E]
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [N, K] fp32 weights, [N, K] experts
        if self.table is None:
            self.table = draw(router_logits.shape[-1], top_k).to(hidden_states.device)
        rows = len(hidden_states)
        self.called.add(rows)
        experts = self.table[:rows].to(indices_type or torch.int32, copy=True)
        weights = torch.full((rows, top_k), 1 / top_k, device=hidden_states.device)
        return weights, experts

    def experts_read(self, rows: int) -> int:
        """By a layer in a step of `rows`, as engines pad it.

        Raises:
            RuntimeError: no layer has asked for so many rows, so its router is another.
        """
        if not (padded := [n for n in self.called if n >= rows]):
            raise RuntimeError(
                f"expected a layer to ask for experts of {rows} rows or more, got "
                f"{sorted(self.called)}: set {ROUTING}={EVEN} before vLLM starts."
            )
        assert self.table is not None
        return len(self.table[: min(padded)].unique())


def draw(num_experts: int, top_k: int) -> torch.Tensor:
    """[MOST_ROWS, K] int64: K experts a row, each set of K as likely as any."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(MOST_ROWS, num_experts, generator=generator).topk(top_k).indices


EVEN_ROUTING = EvenRouting()
RoutingSimulator.register_strategy(EVEN, EVEN_ROUTING)


class EvenProbe(WorkerProbe):
    """vLLM mixes this into its worker, where importing it registers the routing."""

    def experts_read(self, rows: int) -> int:
        return EVEN_ROUTING.experts_read(rows)
