"""Walks a grammar along the best guesses of a canvas: what is legal is taken, what is not gives way
to the most probable legal token."""

import math

import numpy as np

from vllm_dllm.grammar.rows import CanvasRows, Path
from vllm_dllm.grammar.state import (
    MOST_SPACES,
    GrammarState,
    is_forced,
    is_legal,
    legal_tokens,
    words_of,
)

SURE = math.log(0.99)
"""Log-probability from which on a legal best guess needs no mask: what is illegal in that row has
hardly any probability."""

CONFIDENT = math.log(0.5)


def walk(state: GrammarState, rows: CanvasRows, num_rows: int) -> Path:
    """Along the first `num_rows` rows, or to the token that ends the answer, or to a dead end.
    Moves `state`.

    A stretch of rows that the model is sure of is consumed in one call; every other row has its
    mask computed, which its entropy and its candidate need anyway.
    """
    path = Path()
    unsure = unsure_rows(state, rows, num_rows)
    guesses, best = rows.tokens[:, 0].tolist(), rows.logprobs[:, 0].tolist()
    row = think(state, rows, num_rows, path)
    while row < num_rows and not state.has_ended and not path.is_stuck:
        stretch_end = int(unsure[np.searchsorted(unsure, row)])
        if stretch_end > row:
            count = state.consume_text(guesses[row:stretch_end])
            path.tokens += guesses[row : row + count]
            path.logprobs += best[row : row + count]
            row += count
            if row == num_rows:
                break
        if not take_best_legal(state, rows, row, path):
            path.is_stuck = True
            break
        row += 1
    return path


def think(state: GrammarState, rows: CanvasRows, num_rows: int, path: Path) -> int:
    """Takes the rows of the reasoning, if there is any, as they are; where the model would stop,
    the reasoning ends. Returns the first row behind it. Moves `state`."""
    row = 0
    while row < num_rows and state.reasoning is not None:
        guess = int(rows.tokens[row, 0])
        token: int | None = guess
        if not state.allows(guess):
            path.masks[row] = words = state.mask()
            ends = state.ends_of_reasoning() if guess in state.stops else []
            chosen = best_legal_token(
                rows, row, words_of(state.vocabulary.size, ends) if ends else words
            )
            token = None if chosen is None else chosen[0]
        if token is None or not state.consume(token):
            path.is_stuck = True
            break
        path.tokens.append(token)
        path.logprobs.append(logprob_of(state, rows, row, token))
        row += 1
    path.num_reasoning = row
    return row


def unsure_rows(state: GrammarState, rows: CanvasRows, num_rows: int) -> np.ndarray:
    """Returns the rows, rising, whose best guess is not as good as decided, or is whitespace or a
    stop token; and `num_rows`."""
    guess = rows.tokens[:num_rows, 0]
    unsure = rows.logprobs[:num_rows, 0] < SURE
    unsure |= state.vocabulary.spaces[guess] > 0
    for stop in state.stops:
        unsure |= guess == stop
    return np.append(np.flatnonzero(unsure), num_rows)


def take_best_legal(state: GrammarState, rows: CanvasRows, row: int, path: Path) -> bool:
    """Takes the row's most probable legal token. False: there is none."""
    words = legal_words(state)
    if (chosen := best_legal_token(rows, row, words)) is None:
        return False
    token, logprob, rank = chosen
    path.masks[row] = words
    if is_forced(words):
        path.forced.add(row)
    if rank != 0:
        best = float(rows.logprobs[row, 0])
        path.cost_nats += best - logprob
        if best > CONFIDENT:
            path.confident_cost_nats += best - logprob
        if path.first_repair is None:
            path.first_repair = row
    path.tokens.append(token)
    path.logprobs.append(logprob)
    consumed = state.consume(token)
    assert consumed, f"the mask has token {token}, which the grammar then rejects"
    return True


def legal_words(state: GrammarState) -> np.ndarray:
    """The state's mask [W], without whitespace where there has been enough of it.

    Raises:
        StuckError: the matcher has given up.
    """
    words = state.mask()
    if state.error:
        raise StuckError(state.error)
    if state.spaces >= MOST_SPACES and state.reasoning is None:
        forbid_spaces_(state, words)
    return words


def best_legal_token(
    rows: CanvasRows, row: int, words: np.ndarray
) -> tuple[int, float, int] | None:
    """Token, log-probability and rank of the row's most probable legal token; rank K: behind the
    K most probable ones. None: no token is legal."""
    for rank, token in enumerate(rows.tokens[row].tolist()):
        if is_legal(words, token):
            return token, float(rows.logprobs[row, rank]), rank
    if not words.any():
        return None
    token, logprob = rows.best_legal(row, words)
    return token, logprob, rows.tokens.shape[1]


def forbid_spaces_(state: GrammarState, words: np.ndarray) -> None:
    """Unless whitespace alone is legal."""
    size = state.vocabulary.size
    others = legal_tokens(words, size) & (state.vocabulary.spaces == 0)
    if others.any():
        padded = np.zeros(len(words) * 32, dtype=bool)
        padded[:size] = others
        words[:] = np.packbits(padded, bitorder="little").view(np.uint32)


def masks_along(state: GrammarState, rows: CanvasRows, tokens: list[int]) -> Path:
    """The masks of a path that was found otherwise. Moves `state`."""
    path = Path()
    for row, token in enumerate(tokens):
        best = logprob = float(rows.logprobs[row, 0])
        is_free = state.reasoning is not None
        path.num_reasoning += is_free
        if token != rows.tokens[row, 0] or (best < SURE and not is_free):
            words = legal_words(state)
            path.masks[row] = words
            if is_forced(words):
                path.forced.add(row)
            logprob = logprob_of(state, rows, row, token)
            path.cost_nats += best - logprob
        path.tokens.append(token)
        path.logprobs.append(logprob)
        consumed = state.consume(token)
        assert consumed, f"token {token} of a path is illegal"
    return path


def logprob_of(state: GrammarState, rows: CanvasRows, row: int, token: int) -> float:
    found = np.flatnonzero(rows.tokens[row] == token)
    if len(found):
        return float(rows.logprobs[row, found[0]])
    return rows.best_legal(row, words_of(state.vocabulary.size, [token]))[1]


class StuckError(RuntimeError):
    """No token is legal though the grammar is incomplete; mostly a limit of llguidance."""
