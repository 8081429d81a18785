"""Beam search for a cheap legal path, where the model is too unsure for the best-first search.

A confident token in the wrong place, like a quotation mark too early, is legal, and everything
after it has to be repaired. So several paths are followed at once. A path costs how much less
probable its tokens are than the rows' best guesses.
"""

from dataclasses import dataclass

import numpy as np

from vllm_dllm.grammar.masks import has_tokens
from vllm_dllm.grammar.rows import CanvasRows, FoundPath
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import find_unsure_rows, mask_with_few_spaces

BEAM_WIDTH = 12
_MARGIN_NATS = 16.0
"""Paths that cost this much more than the cheapest are dropped."""


@dataclass
class _Hypothesis:
    """One of the paths that the search follows: its tokens up to some row."""

    state: GrammarState  # after the tokens
    tokens: list[int]
    cost_nats: float
    mask: np.ndarray | None  # [W] uint32, legal after the tokens; None: they ended the answer


def beam_search(
    start: GrammarState,
    rows: CanvasRows,
    num_rows: int,
    prefix: list[int],  # for the first rows: all of the reasoning, and no repair of the answer
) -> FoundPath | None:
    """Returns the cheapest path found through the first `num_rows` rows that begins with the tokens
    `prefix`. Returns None if every path comes to a dead end. Does not move `start`, the state at
    the canvas' first row.

    Raises:
        StuckError: the matcher has given up.
    """
    state = start.copy()
    for token in prefix:
        state.consume_token(token)
    beam = [_Hypothesis(state, list(prefix), 0.0, mask_with_few_spaces(state))]
    ended: list[_Hypothesis] = []
    unsure = find_unsure_rows(start, rows, num_rows)
    row = len(prefix)
    while row < num_rows:
        if len(beam) == 1 and (count := _consume_sure_rows(beam[0], rows, row, unsure)):
            row += count
            continue
        beam = _extend_by_one_row(beam, rows, row)
        ended += [one for one in beam if one.state.has_ended]
        beam = [one for one in beam if not one.state.has_ended]
        if ended:
            best = min(one.cost_nats for one in ended)
            beam = [one for one in beam if one.cost_nats < best]
        if not beam:
            break
        row += 1
    cheapest = min(beam + ended, key=lambda one: one.cost_nats, default=None)
    return None if cheapest is None else FoundPath(cheapest.tokens, cheapest.cost_nats)


def _consume_sure_rows(
    hypothesis: _Hypothesis, rows: CanvasRows, row: int, unsure: np.ndarray
) -> int:
    """Extends a hypothesis in place by the best guesses from `row` on. It stops before the first
    illegal guess and before the first of the `unsure` rows, [n] int64. Returns the number of tokens
    that it has added."""
    next_unsure = int(unsure[np.searchsorted(unsure, row)])
    guesses = rows.tokens[row:next_unsure, 0].tolist()
    count = hypothesis.state.consume_tokens(guesses) if guesses else 0
    if count:
        hypothesis.tokens += guesses[:count]
        hypothesis.mask = mask_with_few_spaces(hypothesis.state)
    return count


def _extend_by_one_row(beam: list[_Hypothesis], rows: CanvasRows, row: int) -> list[_Hypothesis]:
    """Returns the cheapest hypotheses that are one token longer than those of `beam`, at most
    `BEAM_WIDTH`. Hypotheses with the same mask are mostly in the same state: only the cheapest one
    of them is kept. Does not change `beam`."""
    tokens, logprobs = rows.candidates(row)
    costs = (logprobs[0] - logprobs).tolist()
    children: list[tuple[float, int, int]] = []  # cost, index in the beam, token
    for i, parent in enumerate(beam):
        assert parent.mask is not None, "hypotheses that ended are not extended"
        legal = np.flatnonzero(has_tokens(parent.mask, tokens)).tolist()
        for rank in legal:
            children.append((parent.cost_nats + costs[rank], i, int(tokens[rank])))
        if not legal and parent.mask.any():
            token, logprob = rows.best_legal(row, parent.mask)
            children.append((parent.cost_nats + float(logprobs[0]) - logprob, i, token))
    children.sort()
    kept: list[_Hypothesis] = []
    seen: set[bytes] = set()
    for cost, i, token in children:
        if cost > children[0][0] + _MARGIN_NATS or len(kept) == BEAM_WIDTH:
            break
        state = beam[i].state.copy()
        if not state.consume_token(token):
            continue
        mask = None if state.has_ended else mask_with_few_spaces(state)
        signature = b"" if mask is None else mask.tobytes()
        if signature not in seen:
            seen.add(signature)
            kept.append(_Hypothesis(state, [*beam[i].tokens, token], cost, mask))
    return kept
