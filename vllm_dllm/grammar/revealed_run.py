"""Finds the legal run of tokens that a step reveals in a canvas whose tokens stay once revealed.

A revealed token cannot be taken back. So no token is revealed to the right of an open row, and none
after which the answer could not be closed any more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from vllm_dllm.grammar.canvas import cut_to_fit
from vllm_dllm.grammar.masks import mask_of_tokens, only_token
from vllm_dllm.grammar.rows import LegalPath
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import StuckError, mask_with_few_spaces


class RowCandidate(NamedTuple):
    """The token that a row would reveal."""

    token: int
    probability: float  # without the grammar
    entropy_nats: float  # of the row's distribution without the grammar


ChooseCandidate = Callable[[int, np.ndarray | None], RowCandidate]
"""(row of the canvas, mask [W] uint32 of the tokens to choose from) -> the row's candidate. A mask
of None allows all tokens."""


@dataclass(frozen=True)
class RunRule:
    """Says how far the run of one step goes."""

    min_tokens: int
    """The run has at least this many tokens, however improbable they are, unless the answer
    ends."""
    threshold: float  # a token that is more probable than this is revealed
    entropy_bound_nats: float
    """A token is also revealed while the summed entropy of the run's rows is below this bound."""
    part_length: int | None = None
    """A run ends where the next part of the block begins. Parts have this many tokens; None: the
    block has no parts."""
    block_offset: int = 0  # the canvas' first row, counted from the beginning of its block


class Run(NamedTuple):
    """The tokens that a step reveals, at least one."""

    tokens: list[int]
    is_cut: bool  # whether tokens were replaced to close an answer that does not fit


def reveal_run(
    state: GrammarState,  # at the row `first`; moved to the end of the run
    choose_candidate: ChooseCandidate,
    first: int,
    num_rows: int,  # of the canvas, more than `first`
    num_tokens: int,  # that the answer may still get, from the row `first` on; at least 1
    rule: RunRule,
    stop: int,  # ends an answer that is cut
) -> Run:
    """Returns the tokens that a step reveals in the rows from `first` on. Moves `state` past them.
    The answer can be closed after them within `num_tokens`, unless no completion that fits is found
    or the model is inside of a call that it chose to make. Raises StuckError if no token is legal,
    or the matcher has given up."""
    max_tokens = min(num_rows - first, num_tokens)
    end = state.copy()
    tokens = _choose_run(end, choose_candidate, first, max_tokens, rule)
    closing = cut_to_fit(state, LegalPath(tokens), end, num_tokens)
    is_cut = False
    if closing is not None:
        pairs = zip(tokens, closing, strict=False)
        num_kept = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        tokens = [*closing, stop][: min(max_tokens, max(num_kept, rule.min_tokens, 1))]
        is_cut = len(tokens) > num_kept
    for token in tokens:
        consumed = state.consume_token(token)
        assert consumed, f"token {token} of a run is illegal"
    return Run(tokens, is_cut)


def _choose_run(
    state: GrammarState,  # at the row `first`; moved to the end of the run
    choose_candidate: ChooseCandidate,
    first: int,
    max_tokens: int,
    rule: RunRule,
) -> list[int]:
    """Returns the legal tokens from the row `first` on that the rule reveals, at most `max_tokens`.
    Raises StuckError if no token is legal at the row `first`, or the matcher has given up."""
    tokens: list[int] = []
    summed_nats, part = 0.0, rule.part_length
    for row in range(first, first + max_tokens):
        is_due = len(tokens) < max(rule.min_tokens, 1)
        is_next_part = part is not None and (rule.block_offset + row) % part == 0
        if state.has_ended or (is_next_part and not is_due):
            break
        mask = mask_with_few_spaces(state)
        if not mask.any():
            if not tokens:
                raise StuckError("no token is legal")
            break
        if (token := only_token(mask)) is None:
            # Where the model would stop inside of its reasoning, it ends the reasoning.
            ends = state.reasoning_ends()
            if ends and choose_candidate(row, None).token in state.stops:
                mask = mask_of_tokens(ends, state.vocabulary.size)
            candidate = choose_candidate(row, mask)
            token, summed_nats = candidate.token, summed_nats + candidate.entropy_nats
            is_sure = candidate.probability > rule.threshold
            if not (is_due or is_sure or summed_nats < rule.entropy_bound_nats):
                break
        consumed = state.consume_token(token)
        assert consumed, f"the mask has token {token}, which the grammar then rejects"
        tokens.append(token)
    return tokens
