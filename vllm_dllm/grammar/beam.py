"""Several paths at once, where walking along the best guess gets expensive.

A confident token in the wrong place, like a quotation mark too early, is legal, and everything
behind it has to be repaired. So the beam keeps the `WIDTH` cheapest paths, where a path costs how
much less probable its tokens are than the rows' best guesses.
"""

from dataclasses import dataclass

import numpy as np

from vllm_dllm.grammar.cheapest import cheapest
from vllm_dllm.grammar.rows import CanvasRows, Path
from vllm_dllm.grammar.state import GrammarState, legal_among
from vllm_dllm.grammar.walk import legal_words, masks_along, unsure_rows, walk

WIDTH = 12
WORTH_NATS = 2.0
"""A walk is searched again if its repairs of what the model is confident of cost more. Where it is
sure of nothing yet, a better path is worth little, and the next step changes it."""
_ROWS_BEFORE = 24
"""How far before the first repair the wrong token may be."""
_MARGIN_NATS = 16.0
"""Paths that are worse than the best by more are dropped."""


@dataclass
class _Fork:
    state: GrammarState
    tokens: list[int]
    cost: float
    words: (
        np.ndarray | None
    )  # [W] uint32, the tokens legal behind them; None: they ended the answer


def search(start: GrammarState, rows: CanvasRows, num_rows: int) -> tuple[Path, GrammarState]:
    """The cheapest path that a walk, or else the beam, finds, and the state behind it. Does not
    move `start`."""
    end = start.copy()
    path = walk(end, rows, num_rows)
    if path.confident_cost_nats <= WORTH_NATS and not path.is_stuck:
        return path, end
    wrong = len(path.tokens) if path.first_repair is None else path.first_repair
    num_known = max(path.num_reasoning, wrong - _ROWS_BEFORE)
    known = path.tokens[:num_known]
    found = cheapest(start, rows, num_rows, known) or beam(start, rows, num_rows, known)
    if found is None or (found[1] >= path.cost_nats and not path.is_stuck):
        return path, end
    end = start.copy()
    return masks_along(end, rows, found[0]), end


def beam(
    start: GrammarState, rows: CanvasRows, num_rows: int, known: list[int]
) -> tuple[list[int], float] | None:
    """The best path that begins with the `known` tokens, all of its reasoning and no repair of the
    answer, and its cost.
    None: all of them come to dead ends. Does not move `start`."""
    state = start.copy()
    for token in known:
        state.consume(token)
    forks = [_Fork(state, list(known), 0.0, legal_words(state))]
    ended: list[_Fork] = []
    unsure = unsure_rows(start, rows, num_rows)
    row = len(known)
    while row < num_rows:
        if len(forks) == 1 and (count := _run(forks[0], rows, row, unsure)):
            row += count
            continue
        forks = _advance(forks, rows, row)
        ended += [fork for fork in forks if fork.state.has_ended]
        forks = [fork for fork in forks if not fork.state.has_ended]
        if ended:
            best = min(fork.cost for fork in ended)
            forks = [fork for fork in forks if fork.cost < best]
        if not forks:
            break
        row += 1
    best_fork = min(forks + ended, key=lambda fork: fork.cost, default=None)
    return None if best_fork is None else (best_fork.tokens, best_fork.cost)


def _run(fork: _Fork, rows: CanvasRows, row: int, unsure: np.ndarray) -> int:
    """Takes the rows that the model is sure of at once, as a walk does. Returns their number."""
    end = int(unsure[np.searchsorted(unsure, row)])
    guesses = rows.tokens[row:end, 0].tolist()
    count = fork.state.consume_text(guesses) if guesses else 0
    if count:
        fork.tokens += guesses[:count]
        fork.words = legal_words(fork.state)
    return count


def _advance(forks: list[_Fork], rows: CanvasRows, row: int) -> list[_Fork]:
    """One row further. Of forks with the same legal tokens, which are mostly in the same state, the
    cheaper one stays."""
    tokens, logprobs = rows.of_row(row)
    costs = (logprobs[0] - logprobs).tolist()
    children: list[tuple[float, int, int]] = []  # cost, fork, token
    for i, fork in enumerate(forks):
        words = fork.words
        assert words is not None, "forks that ended do not go on"
        legal = np.flatnonzero(legal_among(words, tokens)).tolist()
        for rank in legal:
            children.append((fork.cost + costs[rank], i, int(tokens[rank])))
        if not legal and words.any():
            token, logprob = rows.best_legal(row, words)
            children.append((fork.cost + float(logprobs[0]) - logprob, i, token))
    children.sort()
    found: list[_Fork] = []
    seen: set[bytes] = set()
    for cost, i, token in children:
        if cost > children[0][0] + _MARGIN_NATS or len(found) == WIDTH:
            break
        state = forks[i].state.copy()
        if not state.consume(token):
            continue
        words = None if state.has_ended else legal_words(state)
        signature = b"" if words is None else words.tobytes()
        if signature in seen:
            continue
        seen.add(signature)
        found.append(_Fork(state, [*forks[i].tokens, token], cost, words))
    return found
