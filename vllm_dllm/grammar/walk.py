"""Walks a grammar along the best guesses of a canvas. A legal guess is kept. An illegal one gives
way to the row's most probable legal token."""

import math
from typing import NamedTuple

import numpy as np

from vllm_dllm.grammar.rows import (
    CanvasRows,
    LegalPath,
    has_one_token,
    has_token,
    mask_of_tokens,
    pack_mask,
    unpack_mask,
)
from vllm_dllm.grammar.state import GrammarState

SURE_LOGPROB = math.log(0.99)
"""A row gets no mask if its best guess is legal and at least this probable: all other tokens have
hardly any probability."""
_CONFIDENT_LOGPROB = math.log(0.5)
MAX_SPACES = 32
"""The most characters of whitespace in succession, from tokens of whitespace alone. JSON allows any
number, and a model that is unsure of what follows would write it to the end of the canvas."""


class StuckError(RuntimeError):
    """No token is legal though the grammar is incomplete, mostly because of a limit of
    llguidance."""


def walk_best_guesses(state: GrammarState, rows: CanvasRows, num_rows: int) -> LegalPath:
    """Returns a legal path through the first `num_rows` rows: each row's best guess, or where that
    is illegal the row's most probable legal token. Moves `state` to the path's end. The path stops
    early where the answer ends, or with `is_stuck` where no token is legal.

    Successive rows that the model is sure of are consumed in one call. Every other row has its mask
    computed, which the row's entropy and candidate need anyway.

    Raises:
        StuckError: the matcher has given up.
    """
    path = LegalPath()
    unsure = find_unsure_rows(state, rows, num_rows)
    guesses, best = rows.tokens[:, 0].tolist(), rows.logprobs[:, 0].tolist()
    row = _walk_reasoning(state, rows, num_rows, path)
    while row < num_rows and not state.has_ended and not path.is_stuck:
        next_unsure = int(unsure[np.searchsorted(unsure, row)])
        if next_unsure > row:
            count = state.consume_tokens(guesses[row:next_unsure])
            path.tokens += guesses[row : row + count]
            path.logprobs += best[row : row + count]
            row += count
            if row == num_rows:
                break
        if not _append_best_legal_token(state, rows, row, path):
            path.is_stuck = True
            break
        row += 1
    return path


def _walk_reasoning(state: GrammarState, rows: CanvasRows, num_rows: int, path: LegalPath) -> int:
    """Appends the best guesses of the rows of reasoning to `path`. A stop token gives way to a
    token that ends the reasoning. Returns the first row after the reasoning, 0 if there is none.
    Moves `state`, and sets `path.is_stuck` where no token is legal."""
    row = 0
    while row < num_rows and state.reasoning is not None:
        guess = int(rows.tokens[row, 0])
        token: int | None = guess
        if not state.allows_token(guess):
            path.masks[row] = mask = state.compute_mask()
            if guess in state.stops and (ends := state.reasoning_ends()):
                mask = mask_of_tokens(ends, state.vocabulary.size)
            choice = _best_legal_token(rows, row, mask)
            token = None if choice is None else choice.token
        if token is None or not state.consume_token(token):
            path.is_stuck = True
            break
        path.tokens.append(token)
        path.logprobs.append(_token_logprob(state, rows, row, token))
        row += 1
    path.num_reasoning = row
    return row


def find_unsure_rows(state: GrammarState, rows: CanvasRows, num_rows: int) -> np.ndarray:
    """Returns the rows [n] int64, rising, whose best guess is less probable than `SURE_LOGPROB`, is
    whitespace, or is a stop token. `num_rows` is added as the last entry. Does not move `state`."""
    guess = rows.tokens[:num_rows, 0]
    unsure = rows.logprobs[:num_rows, 0] < SURE_LOGPROB
    unsure |= state.vocabulary.num_spaces[guess] > 0
    for stop in state.stops:
        unsure |= guess == stop
    return np.append(np.flatnonzero(unsure), num_rows)


def _append_best_legal_token(
    state: GrammarState, rows: CanvasRows, row: int, path: LegalPath
) -> bool:
    """Appends the row's most probable legal token to the path, moves `state` past it, and returns
    True. Returns False and changes nothing if no token is legal. Raises StuckError if the matcher
    has given up."""
    mask = mask_with_few_spaces(state)
    if (choice := _best_legal_token(rows, row, mask)) is None:
        return False
    path.masks[row] = mask
    if has_one_token(mask):
        path.forced.add(row)
    if choice.rank != 0:
        best = float(rows.logprobs[row, 0])
        path.cost_nats += best - choice.logprob
        if best > _CONFIDENT_LOGPROB:
            path.confident_cost_nats += best - choice.logprob
        if path.first_repair is None:
            path.first_repair = row
    path.tokens.append(choice.token)
    path.logprobs.append(choice.logprob)
    consumed = state.consume_token(choice.token)
    assert consumed, f"the mask has token {choice.token}, which the grammar then rejects"
    return True


def mask_with_few_spaces(state: GrammarState) -> np.ndarray:
    """Returns the mask [W] uint32 of the tokens that may come next. After `MAX_SPACES` characters
    of whitespace it has no more whitespace, unless nothing else is legal.

    Raises:
        StuckError: the matcher has given up.
    """
    mask = state.compute_mask()
    if state.error:
        raise StuckError(state.error)
    if state.num_spaces >= MAX_SPACES and state.reasoning is None:
        vocabulary = state.vocabulary
        others = unpack_mask(mask, vocabulary.size) & (vocabulary.num_spaces == 0)
        if others.any():
            mask = pack_mask(others)
    return mask


class _Choice(NamedTuple):
    """A token that was chosen for a row."""

    token: int
    logprob: float
    rank: int  # place among the row's K most probable tokens, from 0; K: it is not among them


def _best_legal_token(rows: CanvasRows, row: int, mask: np.ndarray) -> _Choice | None:
    """Returns the row's most probable token of the mask [W]; None if the mask is empty."""
    for rank, token in enumerate(rows.tokens[row].tolist()):
        if has_token(mask, token):
            return _Choice(token, float(rows.logprobs[row, rank]), rank)
    if not mask.any():
        return None
    return _Choice(*rows.best_legal(row, mask), rows.tokens.shape[1])


def trace_path(state: GrammarState, rows: CanvasRows, tokens: list[int]) -> LegalPath:
    """Returns the path of the legal tokens `tokens`, with its masks, for the canvas' first rows.
    Moves `state` to the path's end. Does not set the path's `first_repair` and
    `confident_cost_nats`.

    Raises:
        StuckError: the matcher has given up.
    """
    path = LegalPath()
    for row, token in enumerate(tokens):
        best = logprob = float(rows.logprobs[row, 0])
        is_free = state.reasoning is not None
        path.num_reasoning += is_free
        if token != rows.tokens[row, 0] or (best < SURE_LOGPROB and not is_free):
            path.masks[row] = mask = mask_with_few_spaces(state)
            if has_one_token(mask):
                path.forced.add(row)
            logprob = _token_logprob(state, rows, row, token)
            path.cost_nats += best - logprob
        path.tokens.append(token)
        path.logprobs.append(logprob)
        consumed = state.consume_token(token)
        assert consumed, f"token {token} of a path is illegal"
    return path


def _token_logprob(state: GrammarState, rows: CanvasRows, row: int, token: int) -> float:
    """Returns a token's log-probability in a row, even if it is not among the K most probable
    tokens."""
    (ranks,) = np.nonzero(rows.tokens[row] == token)
    if len(ranks):
        return float(rows.logprobs[row, ranks[0]])
    return rows.best_legal(row, mask_of_tokens([token], state.vocabulary.size))[1]
