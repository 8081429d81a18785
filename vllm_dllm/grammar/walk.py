"""Walks a grammar along the best guesses of a canvas. A legal guess is kept. An illegal one gives
way to the row's most probable legal token. `CanvasRows` has the model's predictions."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vllm_dllm.grammar.masks import has_token, mask_of_tokens, only_token, pack_mask, unpack_mask
from vllm_dllm.grammar.state import GrammarState

MORE_TOKENS = 512
_ENOUGH_PROBABILITY = 0.9
"""If the K tokens of a row have at least this probability together, a search looks at them
alone."""


@dataclass(frozen=True)
class CanvasRows:
    """The model's predictions for the L rows of a canvas."""

    tokens: np.ndarray  # [L, K] int64, the most probable first
    logprobs: np.ndarray  # [L, K] fp32
    best_legal: Callable[[int, np.ndarray], tuple[int, float]]
    """(row, mask [W] uint32 of at least one token) -> the most probable token of the mask, and its
    log-probability. For rows whose K tokens are all illegal."""
    more: Callable[[int], tuple[np.ndarray, np.ndarray]]
    """row -> its `MORE_TOKENS` most probable tokens [k] int64, the best first, and their
    log-probabilities [k] fp32. For rows whose K tokens have little probability."""

    def candidates(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [k] int64 of a row that a search for a cheap path looks at, and their
        log-probabilities [k] fp32, the most probable first."""
        if np.exp(self.logprobs[row]).sum() >= _ENOUGH_PROBABILITY:
            return self.tokens[row], self.logprobs[row]
        return self.more(row)

    def first(self, num_rows: int) -> "CanvasRows":
        """Returns the predictions for the first `num_rows` rows."""
        return replace(self, tokens=self.tokens[:num_rows], logprobs=self.logprobs[:num_rows])

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class LegalPath:
    """Legal tokens, one for each row beginning at the canvas' first, and facts about these rows."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cost_nats: float = 0.0
    """Summed log-probability of repaired rows' best guesses, minus that of the path."""
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> [W] uint32, the tokens that are legal in it after the path's tokens before it. Rows
    that the model is sure of have no mask: their distribution stays as it is."""
    num_reasoning: int = 0  # how many of the first tokens are reasoning
    forced: set[int] = field(default_factory=set)  # rows that have one legal token
    is_stuck: bool = False  # no token is legal after these, though the answer has not ended
    first_repair: int | None = None
    """The first row whose best guess is illegal; None: no row, or the path is not a walk."""
    confident_cost_nats: float = 0.0
    """The part of `cost_nats` from rows whose best guess is more probable than all other tokens
    together. Only a walk computes it."""


SURE_LOGPROB = math.log(0.99)
"""A row gets no mask if its best guess is legal and at least this probable: all other tokens have
hardly any probability."""
_CONFIDENT_LOGPROB = math.log(0.5)
MAX_SPACES = 32
"""The most characters of whitespace in succession, from tokens of whitespace alone. JSON allows any
number, and a model that is unsure of what follows would write it to the end of the canvas."""


class StuckError(RuntimeError):
    """No token is legal though the grammar is incomplete, mostly by a limit of llguidance."""


def walk_best_guesses(state: GrammarState, rows: CanvasRows) -> LegalPath:
    """Returns a legal path through the rows: each row's best guess, or where that is illegal the
    row's most probable legal token. Moves `state` to the path's end. The path stops early where the
    answer ends, or with `is_stuck` where no token is legal.

    Successive rows that the model is sure of are consumed in one call. Every other row has its mask
    computed, which the row's entropy and candidate need anyway. Raises StuckError if the matcher
    has given up."""
    path = LegalPath()
    unsure = find_unsure_rows(state, rows)
    guesses, best = rows.tokens[:, 0].tolist(), rows.logprobs[:, 0].tolist()
    _walk_reasoning(state, rows, path)
    while len(path.tokens) < len(rows) and not state.has_ended and not path.is_stuck:
        row = len(path.tokens)
        next_unsure = int(unsure[np.searchsorted(unsure, row)])
        if next_unsure > row:
            end = row + state.consume_tokens(guesses[row:next_unsure])
            path.tokens += guesses[row:end]
            path.logprobs += best[row:end]
        if len(path.tokens) < len(rows):
            _append_best_legal_token(state, rows, path)
    return path


def _walk_reasoning(state: GrammarState, rows: CanvasRows, path: LegalPath) -> None:
    """Appends the best guesses of the rows of reasoning to the empty `path`. A stop token gives way
    to a token that ends the reasoning. Moves `state`. Sets `path.is_stuck` if none is legal."""
    while path.num_reasoning < len(rows) and state.reasoning is not None:
        row = path.num_reasoning
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
            return
        path.tokens.append(token)
        path.logprobs.append(_token_logprob(state, rows, row, token))
        path.num_reasoning += 1


def find_unsure_rows(state: GrammarState, rows: CanvasRows) -> np.ndarray:
    """Returns the rows [n] int64, rising, whose best guess is less probable than `SURE_LOGPROB`, is
    whitespace, or is a stop token. Last comes the number of rows. Does not move `state`."""
    guess = rows.tokens[:, 0]
    unsure = rows.logprobs[:, 0] < SURE_LOGPROB
    unsure |= state.vocabulary.num_spaces[guess] > 0
    for stop in state.stops:
        unsure |= guess == stop
    return np.append(np.flatnonzero(unsure), len(rows))


def _append_best_legal_token(state: GrammarState, rows: CanvasRows, path: LegalPath) -> None:
    """Appends the most probable legal token of the row after the path, and moves `state` past it.
    Sets `path.is_stuck` and changes nothing else if no token is legal. Raises StuckError if the
    matcher has given up."""
    row, mask = len(path.tokens), mask_with_few_spaces(state)
    if (choice := _best_legal_token(rows, row, mask)) is None:
        path.is_stuck = True
        return
    path.masks[row] = mask
    if only_token(mask) is not None:
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


def mask_with_few_spaces(state: GrammarState) -> np.ndarray:
    """Returns the mask [W] uint32 of the tokens that may come next. After `MAX_SPACES` characters
    of whitespace it has no more whitespace, unless nothing else is legal. Raises StuckError if the
    matcher has given up."""
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
    `confident_cost_nats`. Raises StuckError if the matcher has given up."""
    path = LegalPath()
    for row, token in enumerate(tokens):
        best = logprob = float(rows.logprobs[row, 0])
        is_free = state.reasoning is not None
        path.num_reasoning += is_free
        if token != rows.tokens[row, 0] or (best < SURE_LOGPROB and not is_free):
            path.masks[row] = mask = mask_with_few_spaces(state)
            if only_token(mask) is not None:
                path.forced.add(row)
            logprob = _token_logprob(state, rows, row, token)
            path.cost_nats += best - logprob
        path.tokens.append(token)
        path.logprobs.append(logprob)
        consumed = state.consume_token(token)
        assert consumed, f"token {token} of a path is illegal"
    return path


def _token_logprob(state: GrammarState, rows: CanvasRows, row: int, token: int) -> float:
    """Returns a token's log-probability in a row, even if not among the K most probable ones."""
    (ranks,) = np.nonzero(rows.tokens[row] == token)
    if len(ranks):
        return float(rows.logprobs[row, ranks[0]])
    return rows.best_legal(row, mask_of_tokens([token], state.vocabulary.size))[1]
