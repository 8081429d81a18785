"""What the fast versions are measured against, in plain Python.

`plain_walk` is the definition of the walk: a mask for every row. `best_path` is the cheapest path
of all, by dynamic programming over a deterministic automaton, which small grammars have and
llguidance's do not show.
"""

from collections.abc import Hashable, Mapping
from typing import Protocol

import numpy as np

from vllm_dllm.grammar.masks import unpack_mask
from vllm_dllm.grammar.state import GrammarState


class Automaton(Protocol):
    start: Hashable

    def following(self, state: Hashable) -> Mapping[int | None, Hashable]:
        """Token -> the state after it, for every token that may still lead to an end."""


ENDED = "ended"
"""The state after a stop token. Every row behind it is free and costs nothing."""


def plain_walk(
    state: GrammarState,  # moved
    logprobs: np.ndarray,  # [L, V] fp32
) -> list[int]:
    """The most probable legal token of each row in turn, to the one that ends the answer. Without
    the bound on whitespace."""
    tokens: list[int] = []
    for row in logprobs:
        if state.has_ended:
            break
        is_legal = unpack_mask(state.compute_mask(), state.vocabulary.size)
        tokens.append(int(np.where(is_legal, row, -np.inf).argmax()))
        assert state.consume_token(tokens[-1])
    return tokens


def best_path(
    automaton: Automaton,
    logprobs: np.ndarray,  # [L, V] fp32
) -> tuple[list[int], float]:
    """Tokens and cost in nats, as in `rows.LegalPath`, of the cheapest path of all."""
    best: dict[Hashable, tuple[float, list[int]]] = {automaton.start: (0.0, [])}
    for row in logprobs:
        costs = row.max() - row
        reached: dict[Hashable, tuple[float, list[int]]] = {}
        for state, (cost, tokens) in best.items():
            options = {None: ENDED} if state == ENDED else automaton.following(state)
            for token, after in options.items():
                total = cost if token is None else cost + float(costs[token])
                if after not in reached or total < reached[after][0]:
                    reached[after] = (total, tokens if token is None else [*tokens, token])
        best = reached
    cost, tokens = min(best.values(), key=lambda found: found[0])
    return tokens, cost
