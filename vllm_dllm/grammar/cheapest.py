"""The cheapest path, found by going on from the cheapest beginning. Of a canvas that the model is
mostly sure of, it looks at a few states for each fault, where the beam keeps all forks to the end.
"""

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np

from vllm_dllm.grammar.rows import CanvasRows
from vllm_dllm.grammar.state import GrammarState, legal_among
from vllm_dllm.grammar.walk import legal_words, unsure_rows

MOST_STATES = 100
"""That a search looks at before it leaves the canvas to the beam."""


@dataclass
class _Fork:
    state: GrammarState  # behind the tokens, not moved any more
    tokens: list[int]
    cost: float


@dataclass
class _Choices:
    """Tokens that may follow a fork, the cheapest first."""

    fork: _Fork
    costs: list[float]  # of the paths with them
    tokens: list[int]


@dataclass
class _Aside:
    """Other tokens than the best guess of a row that the model is sure of: only if nothing cheaper
    is left, the fork goes on to there, and its choices are looked at."""

    fork: _Fork
    guesses: list[int]  # before the row


def cheapest(
    start: GrammarState, rows: CanvasRows, num_rows: int, known: list[int]
) -> tuple[list[int], float] | None:
    """The cheapest path that begins with the `known` tokens, and its cost. None: it takes more
    than `MOST_STATES` to find. Does not move `start`."""
    return _Search(start, rows, num_rows).run(known)


class _Search:
    def __init__(self, start: GrammarState, rows: CanvasRows, num_rows: int) -> None:
        self._start, self._rows, self._num_rows = start, rows, num_rows
        self._unsure = unsure_rows(start, rows, num_rows)
        self._guesses = rows.tokens[:num_rows, 0].tolist()
        self._gaps = (rows.logprobs[:, 0] - rows.logprobs[:, 1]).tolist()
        # By the least that a path through it costs; of these, the longest beginning first.
        self._waiting: list[tuple[float, int, int, _Fork | _Choices | _Aside]] = []
        self._numbers = count()
        self._seen: set[tuple[int, bytes]] = set()
        self._num_states = 0

    def run(self, known: list[int]) -> tuple[list[int], float] | None:
        """The cheapest path behind the tokens `known`, with its cost in nats. None: none was found
        within `MOST_STATES` states."""
        state = self._start.copy()
        for token in known:
            state.consume(token)
        self._wait(0.0, len(known), _Fork(state, known, 0.0))
        while self._waiting and self._num_states < MOST_STATES:
            found = heapq.heappop(self._waiting)[3]
            if isinstance(found, _Choices):
                self._take_first(found)
            elif isinstance(found, _Aside):
                self._step_aside(found)
            elif found.state.has_ended or len(found.tokens) == self._num_rows:
                return found.tokens, found.cost
            else:
                self._go_on(found)
        return None

    def _wait(self, cost: float, row: int, what: _Fork | _Choices | _Aside) -> None:
        heapq.heappush(self._waiting, (cost, -row, next(self._numbers), what))

    def _go_on(self, fork: _Fork) -> None:
        """Goes on through the rows that the model is sure of, to the next choice."""
        row = len(fork.tokens)
        end = int(self._unsure[np.searchsorted(self._unsure, row)])
        if end > row:
            state, guesses = fork.state.copy(), self._guesses[row:end]
            taken = state.consume_text(guesses)
            for i in range(taken):
                self._wait(fork.cost + self._gaps[row + i], row + i, _Aside(fork, guesses[:i]))
            fork = _Fork(state, fork.tokens + guesses[:taken], fork.cost)
            if len(fork.tokens) == self._num_rows:
                self._wait(fork.cost, self._num_rows, fork)
                return
        self._queue_choices(fork, is_aside=False)

    def _step_aside(self, aside: _Aside) -> None:
        fork, guesses = aside.fork, aside.guesses
        state = fork.state.copy()
        state.consume_text(guesses)
        self._queue_choices(_Fork(state, fork.tokens + guesses, fork.cost), is_aside=True)

    def _queue_choices(self, fork: _Fork, *, is_aside: bool) -> None:
        """Queues the legal tokens of the row behind `fork`, each at the cost of the path with it.
        Of forks with the same legal tokens there, which are mostly in the same state, the first one
        is the cheapest, and the others end. `is_aside`: the row's best guess is left out."""
        self._num_states += 1
        row, words = len(fork.tokens), legal_words(fork.state)
        signature = row, words.tobytes()
        if signature in self._seen and not is_aside:
            return
        self._seen.add(signature)
        tokens, logprobs = self._rows.of_row(row)
        legal = np.flatnonzero(legal_among(words, tokens))
        if is_aside:
            legal = legal[legal > 0]
        best = float(logprobs[0])
        if len(legal):
            costs = (fork.cost + best - logprobs[legal]).tolist()
            choices = _Choices(fork, costs, tokens[legal].tolist())
        elif words.any() and not is_aside:
            token, logprob = self._rows.best_legal(row, words)
            choices = _Choices(fork, [fork.cost + best - logprob], [token])
        else:
            return
        self._wait(choices.costs[0], row + 1, choices)

    def _take_first(self, choices: _Choices) -> None:
        """Goes on with the cheapest token of some choices; the others wait."""
        fork, cost, token = choices.fork, choices.costs.pop(0), choices.tokens.pop(0)
        if choices.costs:
            self._wait(choices.costs[0], len(fork.tokens) + 1, choices)
        state = fork.state.copy()
        if state.consume(token):
            self._wait(cost, len(fork.tokens) + 1, _Fork(state, [*fork.tokens, token], cost))
