"""A canvas under a grammar in one step: which legal tokens take the place of its best guesses.

A path is cut where the answer can still be completed within its tokens. It passes together with a
plan: tokens that complete the answer after it. The next canvas falls back on the plan if it finds
no other completion.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from vllm_dllm.grammar import walk
from vllm_dllm.grammar.completion import (
    find_completion,
    find_completion_quickly,
    search_shortest_first,
)
from vllm_dllm.grammar.masks import mask_of_tokens, only_token
from vllm_dllm.grammar.path_search import beam_search, best_first_search
from vllm_dllm.grammar.state import GrammarState


def cut_to_fit(
    start: GrammarState,  # before the path; its plan and its cached completions are changed
    path: walk.LegalPath,
    end: GrammarState,  # after the path
    num_tokens: int,  # that the answer may get after `start`
) -> list[int] | None:
    """Returns the tokens of the cut answer: the longest beginning of the path, by a quick search,
    after which the answer can be completed, and its completion.

    Returns None if the path may stay as it is: the answer can be completed after it, or it ends
    inside of a call that the model chose to make, or no completion fits. A call of the model's own
    that does not fit is left unfinished. Sets `start.plan`, unless the path ends inside of such a
    call or nothing fits.
    """
    if end.in_optional_call and not path.is_stuck:
        return None
    tail = _find_tail(start, path.tokens, end, num_tokens)
    if tail is not None:
        start.plan = path.tokens + tail
        return None
    num_kept, tail = 0, find_completion(start, num_tokens)
    if tail is None:
        return None
    start.plan = tail
    too_many = len(path.tokens)
    while too_many - num_kept > 1:
        middle = (num_kept + too_many) // 2
        shorter_tail = _find_tail(start, path.tokens[:middle], None, num_tokens)
        if shorter_tail is None:
            too_many = middle
        else:
            num_kept, tail = middle, shorter_tail
    start.plan = path.tokens[:num_kept] + tail
    return start.plan


def _find_tail(
    start: GrammarState,
    tokens: list[int],
    end: GrammarState | None,  # the state after `tokens`, for a full search; None: a quick search
    num_tokens: int,
) -> list[int] | None:
    """Returns the tokens that complete the answer after `start` and `tokens`, if all of them fit
    into `num_tokens`; None if no completion is found. The result is cached in `start.known_tails`,
    because the next step's path mostly begins in the same way."""
    key = (tuple(tokens), num_tokens, end is None)
    if key not in start.known_tails:
        max_tokens = num_tokens - len(tokens)
        state = end or start.copy()
        for token in tokens if end is None else ():
            consumed = state.consume_token(token)
            assert consumed, "a path is legal"
        completion = find_completion_quickly(state, max_tokens, start)
        if completion is None and end is not None:
            completion = search_shortest_first(end, max_tokens)
        is_short = completion is not None and len(completion) <= max_tokens
        start.known_tails[key] = completion if is_short else None
    return start.known_tails[key]


MAX_WALK_COST_NATS = 2.0
"""The walk's repairs of confident rows may cost this much before a search is tried. Where the model
is sure of nothing yet, a better path is worth little: the next step changes it."""
_ROWS_BEFORE_REPAIR = 24
"""Rows before the first repair that a search may change: the wrong token may be among them."""


@dataclass(frozen=True)
class ConstrainedCanvas:
    """The legal tokens of one canvas, and what they mean for the next one."""

    path: walk.LegalPath  # shorter than the canvas if the answer ends: the rows after it are free
    next_forced: list[int]  # tokens that the next canvas has to begin with
    ended: bool  # the path ends the answer
    is_cut: bool  # the answer was cut and closed, because not all of it fits into its tokens


def constrain_canvas(
    start: GrammarState,  # at the canvas' first row; only its plan and found completions change
    rows: walk.CanvasRows,
    num_tokens: int,  # that the answer may still get, those of this canvas included
    stop: int | None,  # stop token to append to an answer that is cut; None: append nothing
) -> ConstrainedCanvas:
    """Returns a legal path through the canvas, cut where the answer would not fit into
    `num_tokens`. If no completion that fits is found, or the model is inside of a call that it
    chose to make, the path stays uncut. Raises StuckError if no token is legal and no completion is
    known, or the matcher has given up."""
    rows = rows.first(num_tokens)
    path, end = find_cheap_path(start, rows)
    tokens = cut_to_fit(start, path, end, num_tokens)
    if tokens is None and path.is_stuck:
        raise walk.StuckError("no token is legal")
    if tokens is not None:
        if stop is not None:
            tokens = [*tokens, stop]
        end = start.copy()
        path = walk.trace_path(end, rows, tokens[: len(rows)])
    return ConstrainedCanvas(path, end.forced_tokens(), end.has_ended, is_cut=tokens is not None)


def find_cheap_path(
    start: GrammarState, rows: walk.CanvasRows
) -> tuple[walk.LegalPath, GrammarState]:
    """Returns a legal path through the rows, up to the answer's end, and the grammar's state after
    the path. Does not move `start`. The path is the walk along the best guesses. If the walk is
    stuck, or its repairs cost more than `MAX_WALK_COST_NATS`, a search may replace it by a cheaper
    path. Raises StuckError if the matcher has given up."""
    end = start.copy()
    path = walk.walk_best_guesses(end, rows)
    if path.confident_cost_nats <= MAX_WALK_COST_NATS and not path.is_stuck:
        return path, end
    first_repair = len(path.tokens) if path.first_repair is None else path.first_repair
    num_kept = max(path.num_reasoning, first_repair - _ROWS_BEFORE_REPAIR)
    prefix = path.tokens[:num_kept]
    cheaper = best_first_search(start, rows, prefix) or beam_search(start, rows, prefix)
    if cheaper is None or (cheaper.cost_nats >= path.cost_nats and not path.is_stuck):
        return path, end
    end = start.copy()
    return walk.trace_path(end, rows, cheaper.tokens), end


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
    """The run has at least this many tokens, however improbable, unless the answer ends."""
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
    A revealed token cannot be taken back. So no token is revealed to the right of an open row, and
    none after which the answer could not be closed any more.
    The answer can be closed after them within `num_tokens`, unless no completion that fits is found
    or the model is inside of a call that it chose to make. Raises StuckError if no token is legal,
    or the matcher has given up."""
    max_tokens = min(num_rows - first, num_tokens)
    end = state.copy()
    tokens = _choose_run(end, choose_candidate, first, max_tokens, rule)
    closing = cut_to_fit(state, walk.LegalPath(tokens), end, num_tokens)
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
        mask = walk.mask_with_few_spaces(state)
        if not mask.any():
            if not tokens:
                raise walk.StuckError("no token is legal")
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
