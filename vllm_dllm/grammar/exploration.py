"""Completes an answer by exploring its grammar, and shortens completions by cutting detours.

Exploring finds an end in any grammar, where the greedy search may turn in a loop for ever.
"""

from collections import Counter, defaultdict

import numpy as np

from vllm_dllm.grammar.continuations import promising_continuations
from vllm_dllm.grammar.respelling import MAX_SHRINKAGE, respell
from vllm_dllm.grammar.state import GrammarState

MAX_TOKENS = 500
"""Exploring goes on for at least this many tokens, however few the answer may have."""


def complete_by_exploring(state: GrammarState, max_tokens: int) -> list[int] | None:
    """Returns tokens that complete the answer, perhaps more than `max_tokens`; None if no end is
    found. Does not move `state`.

    It goes on by a token that has just become legal, so it leaves each loop at the first exit. If
    there are several exits, it takes the one that it has taken least often where the same tokens
    were legal. So in the end it tries all exits. Then it cuts out the detours.
    """
    start, state = state, state.copy()
    vocabulary = state.vocabulary
    order = np.concatenate((vocabulary.special_tokens, vocabulary.characters, vocabulary.spaces))
    was_legal = np.ones(vocabulary.size, dtype=bool)
    tokens: list[int] = []
    times_taken: dict[bytes, Counter[int]] = defaultdict(Counter)  # by the legal tokens
    while len(tokens) <= max(MAX_SHRINKAGE * max_tokens, MAX_TOKENS):
        if state.is_complete():
            return respell(start, _cut_detours(start, tokens))
        following = state.reasoning_ends()[:1] or state.forced_tokens()
        is_legal = state.closing_tokens()
        if not following:
            exits = order[(is_legal & ~was_legal)[order]].tolist()
            choices = exits or order[is_legal[order]].tolist()
            choices = choices or next(promising_continuations(state), [])
            times = times_taken[is_legal.tobytes()]
            following = [min(choices, key=times.__getitem__)] if choices else []
            times.update(following)
        if not following or state.consume_tokens(following) < len(following):
            return None
        tokens, was_legal = tokens + following, is_legal
    return None


def _cut_detours(start: GrammarState, tokens: list[int]) -> list[int]:
    """Returns a completion at `start` that is no longer than `tokens`. Runs of tokens are left out,
    or replaced by one token, where the state after that is like a later state along `tokens`."""
    masks = _masks_along(start, tokens)
    state, i = start.copy(), 0
    while i < len(tokens):
        best, end = tokens[i : i + 1], i + 1
        tried: set[tuple[int, bytes]] = set()  # ten digits lead to one state
        for head in ([], *promising_continuations(state)):
            ahead = state.copy()
            if len(head) > 1 or ahead.consume_tokens(head) < len(head):
                continue
            mask, first = ahead.compute_mask().tobytes(), end + len(head) - len(best) + 1
            if (len(head), mask) in tried:
                continue
            tried.add((len(head), mask))
            if (completing := _find_latest_completing_end(ahead, tokens, masks, first)) is not None:
                best, end = head, completing
        tokens = [*tokens[:i], *best, *tokens[end:]]
        masks = [*masks[: i + len(best)], *masks[end:]]
        if best:
            state.consume_tokens(best)
            i += 1
    return tokens


def reuse_plan(
    plan: list[int],  # completes the answer at `start`
    start: GrammarState,
    state: GrammarState,
) -> list[int] | None:
    """Returns an end of the plan that completes the answer at `state`, if needed after one more
    token or the forced tokens. Tries ends without an added token first. Returns None if no end is
    found."""
    masks = _masks_along(start, plan)
    for head in ([], *promising_continuations(state)):
        ahead = state.copy()
        if ahead.consume_tokens(head) < len(head):
            continue
        joint = _find_latest_completing_end(ahead, plan, masks, 0)
        if joint is not None:
            return [*head, *plan[joint:]]
    return None


def _find_latest_completing_end(
    state: GrammarState,
    tokens: list[int],
    masks: list[bytes],  # the masks before each of the tokens, and after the last
    first: int,
) -> int | None:
    """Returns an index into `tokens`, `first` or later: the tokens from there on complete the
    answer at `state`. Returns None if no index is found.

    Tries only places where the same tokens are legal as at `state`. Bisects these places: in a loop
    that counts, all ends fail that start too late. So it may miss a shorter end.
    """
    mask = state.compute_mask().tobytes()
    same = [i for i in range(first, len(masks)) if masks[i] == mask]
    completing, failing = -1, len(same)
    middle = failing - 1  # the last of all is the most likely, where no loop counts
    while completing < middle:
        if _completes(state, tokens[same[middle] :]):
            completing = middle
        else:
            failing = middle
        middle = (completing + failing) // 2
    return None if completing < 0 else same[completing]


def _masks_along(start: GrammarState, tokens: list[int]) -> list[bytes]:
    """Returns the masks, as bytes, before each of the tokens and after the last. Does not move
    `start`."""
    state, masks = start.copy(), [start.compute_mask().tobytes()]
    for token in tokens:
        state.consume_tokens([token])
        masks.append(state.compute_mask().tobytes())
    return masks


def _completes(state: GrammarState, tokens: list[int]) -> bool:
    """Returns whether the tokens are legal at `state` and complete the answer. Does not move
    `state`."""
    end = state.copy()
    return end.consume_tokens(tokens) == len(tokens) and end.is_complete()
