"""A way of closing an answer that comes through everywhere, without its detours."""

from collections import Counter, defaultdict

import numpy as np

from vllm_dllm.grammar.continuations import continuations
from vllm_dllm.grammar.respelling import LONGER, respelled
from vllm_dllm.grammar.state import GrammarState

MOST_TOKENS = 500
"""After which it gives up, unless an answer may be a quarter as long."""


def wandering_completion(state: GrammarState, most_tokens: int) -> list[int] | None:
    """Takes what has just become legal, so that it leaves each loop at its first exit, and of
    several exits the one that it has taken least often where the same was legal: it comes through
    everywhere in the end. Then it leaves out the detours."""
    start, state = state, state.copy()
    vocabulary = state.vocabulary
    order = np.concatenate((vocabulary.specials, vocabulary.characters, vocabulary.blanks))
    before = np.ones(vocabulary.size, dtype=bool)
    tokens: list[int] = []
    taken: dict[bytes, Counter[int]] = defaultdict(Counter)
    while len(tokens) <= max(LONGER * most_tokens, MOST_TOKENS):
        if state.is_complete():
            return respelled(start, _without_detours(start, tokens))
        following = state.ends_of_reasoning()[:1] or state.forced_tokens()
        is_legal = state.closing_tokens()
        if not following:
            exits = order[(is_legal & ~before)[order]].tolist()
            among = exits or order[is_legal[order]].tolist() or next(continuations(state), [])
            times = taken[is_legal.tobytes()]
            following = [min(among, key=times.__getitem__)] if among else []
            times.update(following)
        if not following or state.consume_text(following) < len(following):
            return None
        tokens, before = tokens + following, is_legal
    return None


def _without_detours(start: GrammarState, tokens: list[int]) -> list[int]:
    """A shorter way to the same end: without some of the tokens, or with one in the place of
    several, where that leads to a state like a later one."""
    masks = _masks_along(start, tokens)
    state, i = start.copy(), 0
    while i < len(tokens):
        best, end = tokens[i : i + 1], i + 1
        tried: set[tuple[int, bytes]] = set()  # ten digits lead to one state
        for head in ([], *continuations(state)):
            ahead = state.copy()
            if len(head) > 1 or ahead.consume_text(head) < len(head):
                continue
            mask, first = ahead.mask().tobytes(), end + len(head) - len(best) + 1
            if (len(head), mask) in tried:
                continue
            tried.add((len(head), mask))
            if (known := _furthest_alike(ahead, tokens, masks, first)) is not None:
                best, end = head, known
        tokens = [*tokens[:i], *best, *tokens[end:]]
        masks = [*masks[: i + len(best)], *masks[end:]]
        if best:
            state.consume_text(best)
            i += 1
    return tokens


def end_of(
    plan: list[int],  # completes the answer at `start`
    start: GrammarState,
    state: GrammarState,
) -> list[int] | None:
    """Returns the shortest end of the plan that completes the answer at `state`, or behind one more
    token there, if one is found."""
    masks = _masks_along(start, plan)
    for head in ([], *continuations(state)):
        ahead = state.copy()
        if ahead.consume_text(head) < len(head):
            continue
        begin = _furthest_alike(ahead, plan, masks, 0)
        if begin is not None:
            return [*head, *plan[begin:]]
    return None


def _furthest_alike(
    state: GrammarState,
    tokens: list[int],
    masks: list[bytes],  # before each of the tokens, and behind the last
    first: int,
) -> int | None:
    """Finds how far on, from `first`, the rest of the tokens still completes the answer at `state`.
    States of one mask count as alike. Nothing tells turns of a loop that counts apart, so the
    furthest is searched by halves."""
    mask = state.mask().tobytes()
    alike = [j for j in range(first, len(masks)) if masks[j] == mask]
    known, fails = -1, len(alike)
    middle = fails - 1  # the last of all is the most likely, where no loop counts
    while known < middle:
        if _completes(state, tokens[alike[middle] :]):
            known = middle
        else:
            fails = middle
        middle = (known + fails) // 2
    return None if known < 0 else alike[known]


def _masks_along(start: GrammarState, tokens: list[int]) -> list[bytes]:
    """Returns the masks before each of the tokens, and behind the last."""
    state, masks = start.copy(), [start.mask().tobytes()]
    for token in tokens:
        state.consume_text([token])
        masks.append(state.mask().tobytes())
    return masks


def _completes(state: GrammarState, tokens: list[int]) -> bool:
    end = state.copy()
    return end.consume_text(tokens) == len(tokens) and end.is_complete()
