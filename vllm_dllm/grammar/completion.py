"""Finds few tokens that complete an answer from where it is.

llguidance tells which tokens are legal, not how far the end is. So the shortest completion is
searched: first greedily, then by exploring, then shortest first.

Completions have no stop token; `[]` means that the answer is complete. No function moves the state
that it gets. Inside of a tool call that the grammar did not demand, only the model completes the
answer: the searches find nothing.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

import numpy as np

from vllm_dllm.grammar import continuations
from vllm_dllm.grammar.state import GrammarState

MAX_STATES = 500
"""States that a search looks at before it gives up."""
_MAX_SAME_MASK = 2
"""The search goes on from this many states of equal length and mask: they are mostly the same
state."""
_MAX_WAYS = 16


def find_completion(state: GrammarState, max_tokens: int) -> list[int] | None:
    """Returns at most `max_tokens` tokens that complete the answer; None if no search finds them.
    The result is cached in `state.known_completions`."""
    known = state.known_completions
    if max_tokens not in known:
        completion = find_completion_quickly(state, max_tokens, state)
        if completion is None or len(completion) > max_tokens:
            completion = search_shortest_first(state, max_tokens)
        known[max_tokens] = completion
    return known[max_tokens]


def find_completion_quickly(
    state: GrammarState,
    max_tokens: int,
    start: GrammarState,  # `state` or an earlier one; the end of its plan may complete `state`
) -> list[int] | None:
    """Returns tokens that complete the answer, in a tenth of the time of `find_completion`; None if
    none are found. They may be more than `max_tokens` although there is a shorter completion."""
    if state.in_optional_call:
        return None
    if state.has_ended or state.is_complete():
        return []
    completion = complete_greedily(state, max_tokens)
    if completion is None or len(completion) > max_tokens:
        second = None if start.plan is None else reuse_plan(start.plan, start, state)
        if second is None:  # a hundred times slower
            second = complete_by_exploring(state, max_tokens)
        completion = _shortest([completion, second])
    return completion


def _shortest(completions: Iterable[list[int] | None]) -> list[int] | None:
    """Returns the first of the shortest completions; None if all are None."""
    return min((one for one in completions if one is not None), key=len, default=None)


def find_shortest_completion(state: GrammarState, max_tokens: int) -> list[int] | None:
    """Runs all searches and returns the shortest completion that one of them finds; None if none
    has at most `max_tokens` tokens."""
    if state.is_complete():
        return []
    greedy = complete_greedily(state, max_tokens)
    explored = complete_by_exploring(state, max_tokens)
    shortest = _shortest([greedy, explored])
    at_most = max_tokens if shortest is None else min(max_tokens, len(shortest) - 1)
    shorter = search_shortest_first(state, at_most)
    shortest = shortest if shorter is None else shorter
    return shortest if shortest is not None and len(shortest) <= max_tokens else None


def complete_greedily(state: GrammarState, max_tokens: int) -> list[int] | None:
    """Returns the completion that always goes on by the most promising token. Returns None if it
    gets stuck, or is still incomplete after `MAX_SHRINKAGE * max_tokens` tokens. The search is
    cheap, and right for most of JSON."""
    start, state = state, state.copy()
    tokens: list[int] = []
    while len(tokens) <= continuations.MAX_SHRINKAGE * max_tokens:
        if state.is_complete():
            return continuations.respell(start, tokens)
        following = next(continuations.promising_continuations(state), None)
        if following is None or state.consume_tokens(following) < len(following):
            return None
        tokens += following
    return None


def search_shortest_first(state: GrammarState, max_tokens: int) -> list[int] | None:
    """Returns the shortest completion that is among `MAX_STATES` states, looking at the nearest
    states first; None if no completion of at most `max_tokens` tokens is among them."""
    if state.in_optional_call:
        return None
    waiting: dict[int, list[tuple[GrammarState, list[int]]]] = {0: [(state.copy(), [])]}
    num_states = 0
    while waiting and num_states < MAX_STATES:
        length = min(waiting)
        if length > max_tokens:
            return None
        seen: dict[bytes, int] = {}
        for reached, tokens in waiting.pop(length):
            if reached.is_complete():
                return tokens
            mask = reached.compute_mask().tobytes()
            seen[mask] = seen.get(mask, 0) + 1
            if seen[mask] > _MAX_SAME_MASK:
                continue
            num_states += 1
            for following in continuations.promising_continuations(reached, thorough=True):
                ahead = reached.copy()
                is_legal = ahead.consume_tokens(following) == len(following)
                if is_legal and not ahead.in_optional_call:
                    waiting.setdefault(length + len(following), []).append(
                        (ahead, tokens + following)
                    )
    return None


def certainly_has_no_completion(state: GrammarState, max_tokens: int) -> bool:
    """Returns True only if certainly no completion has at most `max_tokens`, as with a rule without
    end. Tries every legal text. Returns False where these are more than `_MAX_WAYS` at once."""
    waiting = deque([(0, state.copy())])
    while waiting and waiting[0][0] <= 2 * max_tokens:
        length, reached = waiting.popleft()
        following = continuations.all_continuations(reached)
        if reached.is_complete() or following is None or len(waiting) + len(following) > _MAX_WAYS:
            return False
        for tokens in following:
            ahead = reached.copy()
            if ahead.consume_tokens(tokens) == len(tokens):
                waiting.append((length + len(tokens), ahead))
    return True


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
    while len(tokens) <= max(continuations.MAX_SHRINKAGE * max_tokens, MAX_TOKENS):
        if state.is_complete():
            return continuations.respell(start, _cut_detours(start, tokens))
        following = state.reasoning_ends()[:1] or state.forced_tokens()
        is_legal = state.closing_tokens()
        if not following:
            exits = order[(is_legal & ~was_legal)[order]].tolist()
            choices = exits or order[is_legal[order]].tolist()
            choices = choices or next(continuations.promising_continuations(state), [])
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
        for head in ([], *continuations.promising_continuations(state)):
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
    token or the forced tokens. Ends without an added token come first. None: no end is found."""
    masks = _masks_along(start, plan)
    for head in ([], *continuations.promising_continuations(state)):
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
    answer at `state`. Returns None if no index is found. Tries only places where the same tokens
    are legal as at `state`. Bisects these places: in a loop that counts, all ends fail that start
    too late. So it may miss a shorter end."""
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
    """Returns masks, as bytes, before each of the tokens and after the last, from `start` on."""
    state, masks = start.copy(), [start.compute_mask().tobytes()]
    for token in tokens:
        state.consume_tokens([token])
        masks.append(state.compute_mask().tobytes())
    return masks


def _completes(state: GrammarState, tokens: list[int]) -> bool:
    """Returns whether the tokens, from `state` on, are legal and complete the answer."""
    end = state.copy()
    return end.consume_tokens(tokens) == len(tokens) and end.is_complete()
