"""Searches for the cheapest legal path through a canvas where the walk's repairs are improbable.

A confident token in the wrong place, like a quotation mark too early, is legal, and everything
after it has to be repaired. So both searches follow several paths at once. A path costs how much
less probable its tokens are than the rows' best guesses.

The best-first search always extends the cheapest beginning. Where the model is mostly sure of a
canvas, it looks at a few states for each fault. The beam search follows all its paths to the end;
it is for where the model is too unsure.
"""

import heapq
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from vllm_dllm.grammar.masks import has_tokens
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import CanvasRows, find_unsure_rows, mask_with_few_spaces

MAX_STATES = 100
"""States that a best-first search looks at before it gives up."""


class FoundPath(NamedTuple):
    """The tokens of a path that a search has found: one for each row from the canvas' first."""

    tokens: list[int]
    cost_nats: float  # summed log-probability of the rows' best guesses, minus that of the tokens


def _state_after(start: GrammarState, tokens: list[int]) -> GrammarState:
    """Returns the state after legal `tokens`. Does not move `start`."""
    state = start.copy()
    for token in tokens:
        state.consume_token(token)
    return state


@dataclass
class _Beginning:
    """The first tokens of a path, and the state after them."""

    state: GrammarState
    tokens: list[int]
    cost_nats: float


@dataclass
class _NextTokens:
    """The legal tokens after a beginning, the cheapest first. The search removes tried ones."""

    beginning: _Beginning
    costs_nats: list[float]  # of the beginning with each of the tokens
    tokens: list[int]


@dataclass
class _Alternative:
    """Stands for all legal tokens but the best guess, in a row that the model is sure of. Its mask
    is computed only when the search has nothing cheaper left."""

    beginning: _Beginning
    guesses: list[int]  # best guesses after the beginning, up to the row before the alternative's


def best_first_search(start: GrammarState, rows: CanvasRows, prefix: list[int]) -> FoundPath | None:
    """Returns the cheapest legal path through the rows that begins with the tokens `prefix`.
    Returns None if it is not found within `MAX_STATES` states. Does not move `start`, the state at
    the canvas' first row. Raises StuckError if the matcher has given up."""
    return _BestFirstSearch(start, rows, prefix).run()


class _BestFirstSearch:
    """One search: its queue, and the states that it has seen. States of queued beginnings are not
    moved any more."""

    def __init__(self, start: GrammarState, rows: CanvasRows, prefix: list[int]) -> None:
        """Queues the beginning `prefix`. Does not move `start`."""
        self._rows, self._unsure = rows, find_unsure_rows(start, rows)
        self._guesses = rows.tokens[:, 0].tolist()
        # [L] nats: the least that another token than the best guess costs.
        self._gaps = (rows.logprobs[:, 0] - rows.logprobs[:, 1]).tolist()
        # (least cost of a path through it, -row, number, item): of equal costs, the furthest first.
        self._queue: list[tuple[float, int, int, _Beginning | _NextTokens | _Alternative]] = []
        self._numbers = count()
        self._seen: set[tuple[int, bytes]] = set()  # row and mask
        self._num_states = 0
        self._push(0.0, len(prefix), _Beginning(_state_after(start, prefix), prefix, 0.0))

    def run(self) -> FoundPath | None:
        """Runs the search, once. Returns what `best_first_search` returns."""
        while self._queue and self._num_states < MAX_STATES:
            item = heapq.heappop(self._queue)[3]
            if isinstance(item, _NextTokens):
                self._extend_by_cheapest_token(item)
            elif isinstance(item, _Alternative):
                state = item.beginning.state.copy()
                state.consume_tokens(item.guesses)
                tokens = item.beginning.tokens + item.guesses
                extended = _Beginning(state, tokens, item.beginning.cost_nats)
                self._push_next_tokens(extended, but_best_guess=True)
            elif item.state.has_ended or len(item.tokens) == len(self._rows):
                return FoundPath(item.tokens, item.cost_nats)
            else:
                self._extend_to_unsure_row(item)
        return None

    def _push(
        self, cost_nats: float, row: int, item: _Beginning | _NextTokens | _Alternative
    ) -> None:
        """Queues an item whose cheapest path costs `cost_nats` and which has reached `row`."""
        heapq.heappush(self._queue, (cost_nats, -row, next(self._numbers), item))

    def _extend_to_unsure_row(self, beginning: _Beginning) -> None:
        """Extends a beginning by the best guesses up to the next row that the model is unsure of,
        or the first illegal guess. Queues the tokens that may follow, and an alternative to each of
        the guesses."""
        row = len(beginning.tokens)
        next_unsure = int(self._unsure[np.searchsorted(self._unsure, row)])
        if next_unsure > row:
            state, guesses = beginning.state.copy(), self._guesses[row:next_unsure]
            num_legal = state.consume_tokens(guesses)
            for i in range(num_legal):
                cost = beginning.cost_nats + self._gaps[row + i]
                self._push(cost, row + i, _Alternative(beginning, guesses[:i]))
            tokens = beginning.tokens + guesses[:num_legal]
            beginning = _Beginning(state, tokens, beginning.cost_nats)
            if len(tokens) == len(self._rows):
                self._push(beginning.cost_nats, len(tokens), beginning)
                return
        self._push_next_tokens(beginning, but_best_guess=False)

    def _push_next_tokens(self, beginning: _Beginning, *, but_best_guess: bool) -> None:
        """Queues the legal tokens after a beginning; with `but_best_guess` without the row's best
        guess. Beginnings with the same mask in the same row are mostly in the same state. Only the
        first one of them is extended, which is the cheapest."""
        self._num_states += 1
        row, mask = len(beginning.tokens), mask_with_few_spaces(beginning.state)
        signature = row, mask.tobytes()
        if signature in self._seen and not but_best_guess:
            return
        self._seen.add(signature)
        tokens, logprobs = self._rows.candidates(row)
        legal = np.flatnonzero(has_tokens(mask, tokens))
        if but_best_guess:
            legal = legal[legal > 0]
        best = float(logprobs[0])
        if len(legal):
            costs = (beginning.cost_nats + best - logprobs[legal]).tolist()
            following = _NextTokens(beginning, costs, tokens[legal].tolist())
        elif mask.any() and not but_best_guess:
            token, logprob = self._rows.best_legal(row, mask)
            following = _NextTokens(beginning, [beginning.cost_nats + best - logprob], [token])
        else:
            return
        self._push(following.costs_nats[0], row + 1, following)

    def _extend_by_cheapest_token(self, following: _NextTokens) -> None:
        """Removes the cheapest token from `following`, and queues the beginning extended by it. The
        other tokens go back into the queue."""
        beginning = following.beginning
        cost, token = following.costs_nats.pop(0), following.tokens.pop(0)
        if following.costs_nats:
            self._push(following.costs_nats[0], len(beginning.tokens) + 1, following)
        state = beginning.state.copy()
        if state.consume_token(token):
            extended = _Beginning(state, [*beginning.tokens, token], cost)
            self._push(cost, len(extended.tokens), extended)


BEAM_WIDTH = 12
_MARGIN_NATS = 16.0
"""Paths that cost this much more than the cheapest are dropped."""


@dataclass
class _Hypothesis(_Beginning):
    """One of the beginnings that the beam search follows."""

    mask: np.ndarray | None  # [W] uint32, legal after the tokens; None: they ended the answer


def beam_search(
    start: GrammarState,
    rows: CanvasRows,
    prefix: list[int],  # for the first rows: all of the reasoning, and no repair of the answer
) -> FoundPath | None:
    """Returns the cheapest path found through the rows that begins with the tokens `prefix`.
    Returns None if every path comes to a dead end. Does not move `start`, the state at the canvas'
    first row. Raises StuckError if the matcher has given up."""
    state = _state_after(start, prefix)
    beam = [_Hypothesis(state, list(prefix), 0.0, mask_with_few_spaces(state))]
    ended: list[_Hypothesis] = []
    unsure = find_unsure_rows(start, rows)
    row = len(prefix)
    while row < len(rows) and beam:
        if len(beam) == 1:  # best guesses, up to the next unsure row or the first illegal one
            (only,), next_unsure = beam, int(unsure[np.searchsorted(unsure, row)])
            guesses = rows.tokens[row:next_unsure, 0].tolist()
            if guesses and (num_legal := only.state.consume_tokens(guesses)):
                only.tokens += guesses[:num_legal]
                only.mask = mask_with_few_spaces(only.state)
                row += num_legal
                continue
        beam = _extend_by_one_row(beam, rows, row)
        ended += [one for one in beam if one.state.has_ended]
        beam = [one for one in beam if not one.state.has_ended]
        if ended:
            best = min(one.cost_nats for one in ended)
            beam = [one for one in beam if one.cost_nats < best]
        row += 1
    cheapest = min(beam + ended, key=lambda one: one.cost_nats, default=None)
    return None if cheapest is None else FoundPath(cheapest.tokens, cheapest.cost_nats)


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
    extended: list[_Hypothesis] = []
    seen: set[bytes] = set()
    for cost, i, token in children:
        if cost > children[0][0] + _MARGIN_NATS or len(extended) == BEAM_WIDTH:
            break
        state = beam[i].state.copy()
        if not state.consume_token(token):
            continue
        mask = None if state.has_ended else mask_with_few_spaces(state)
        signature = b"" if mask is None else mask.tobytes()
        if signature not in seen:
            seen.add(signature)
            extended.append(_Hypothesis(state, [*beam[i].tokens, token], cost, mask))
    return extended
