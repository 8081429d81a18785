"""A canvas whose tokens stay once they are revealed: a step reveals a legal run of them from the
left.

What is revealed cannot be taken back, so nothing is revealed to the right of what is still open,
and no token after which the answer could not be closed any more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from vllm_dllm.grammar.closing import cut_to_fit
from vllm_dllm.grammar.rows import Path
from vllm_dllm.grammar.state import GrammarState, is_forced, words_of
from vllm_dllm.grammar.walk import StuckError, legal_words


class Judged(NamedTuple):
    """What a row would put."""

    token: int
    probability: float  # that it has without the grammar
    entropy_nats: float  # of the row's distribution without the grammar


Judge = Callable[[int, np.ndarray | None], Judged]
"""Of a row of the canvas, and the mask [W] of the tokens it may choose from; None: from all."""


@dataclass(frozen=True)
class RunRule:
    """How far a step goes."""

    least: int
    """Tokens that it reveals at least."""
    threshold: float
    """A token that is more probable is revealed next to those on its left."""
    entropy_bound: float
    """Nats; a run is revealed while its summed entropy is below."""
    part_length: int | None = None
    """A part of the block is revealed before what is behind it."""
    in_block: int = 0
    """Where in its block the canvas begins."""


def reveal_run(
    state: GrammarState,  # at the row `first`; moved
    judge: Judge,
    first: int,
    num_rows: int,  # of the canvas, more than `first`
    num_tokens: int,  # that the answer may still get, from the row `first` on; at least 1
    rule: RunRule,
    stop: int,  # ends an answer that is cut
) -> tuple[list[int], bool]:
    """The tokens of the rows from `first` on that a step reveals, at least one: so many that the
    answer can be closed behind them within `num_tokens`; and whether one of them does.

    Raises:
        StuckError: no token is legal.
    """
    most = min(num_rows - first, num_tokens)
    end, run = state.copy(), Path()
    walk_run(end, judge, first, most, rule, run)
    closing = cut_to_fit(state, run, end, num_tokens)
    tokens, closes = run.tokens, False
    if closing is not None:
        pairs = zip(tokens, closing, strict=False)
        num_kept = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        tokens = [*closing, stop][: min(most, max(num_kept, rule.least, 1))]
        closes = len(tokens) > num_kept
    for token in tokens:
        consumed = state.consume(token)
        assert consumed, f"token {token} of a run is illegal"
    return tokens, closes


def walk_run(
    state: GrammarState, judge: Judge, first: int, most: int, rule: RunRule, run: Path
) -> None:
    """Adds the tokens to `run` that the rule reveals, at most so many, and moves `state`."""
    summed_nats, part = 0.0, rule.part_length
    for row in range(first, first + most):
        is_due = len(run.tokens) < max(rule.least, 1)
        is_next_part = part is not None and (rule.in_block + row) % part == 0
        if state.has_ended or (is_next_part and not is_due):
            return
        words = legal_words(state)
        if not words.any():
            if not run.tokens:
                raise StuckError("no token is legal")
            return
        if is_forced(words):
            token = only_token(words)
        else:
            judged = draw(state, judge, row, words)
            token, summed_nats = judged.token, summed_nats + judged.entropy_nats
            is_sure = judged.probability > rule.threshold or summed_nats < rule.entropy_bound
            if not (is_due or is_sure):
                return
        consumed = state.consume(token)
        assert consumed, f"the mask has token {token}, which the grammar then rejects"
        run.tokens.append(token)


def draw(state: GrammarState, judge: Judge, row: int, words: np.ndarray) -> Judged:
    """One of the legal tokens `words` [W]; where the model would stop reasoning, the reasoning
    ends."""
    ends: list[int] = []
    if state.reasoning is not None and judge(row, None).token in state.stops:
        ends = state.ends_of_reasoning()
    return judge(row, words_of(state.vocabulary.size, ends) if ends else words)


def only_token(words: np.ndarray) -> int:
    """Returns the only token of a mask [W]."""
    (place,) = np.flatnonzero(words)
    return int(place) * 32 + int(words[place]).bit_length() - 1
