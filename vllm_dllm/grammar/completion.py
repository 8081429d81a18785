"""Finds few tokens that complete an answer from where it is.

llguidance tells which tokens are legal, not how far the end is. So the shortest completion is
searched: first greedily, then by exploring, then shortest first.

Completions have no stop token; `[]` means that the answer is complete. No function moves the state
that it gets. Inside of a tool call that the grammar did not demand, only the model completes the
answer: the searches find nothing.
"""

from collections import deque

from vllm_dllm.grammar.continuations import all_continuations, promising_continuations
from vllm_dllm.grammar.exploration import complete_by_exploring, reuse_plan
from vllm_dllm.grammar.respelling import MAX_SHRINKAGE, respell
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
    if state.in_optional_call:
        return None
    known = state.known_completions
    if max_tokens not in known:
        found = find_completion_quickly(state, max_tokens, state)
        if found is None or len(found) > max_tokens:
            found = search_shortest_first(state, max_tokens)
        known[max_tokens] = found
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
    found = complete_greedily(state, max_tokens)
    if found is None or len(found) > max_tokens:
        other = None if start.plan is None else reuse_plan(start.plan, start, state)
        if other is None:  # a hundred times slower
            other = complete_by_exploring(state, max_tokens)
        found = min((one for one in (found, other) if one is not None), key=len, default=None)
    return found


def find_shortest_completion(state: GrammarState, max_tokens: int) -> list[int] | None:
    """Runs all searches and returns the shortest completion that one of them finds; None if none
    has at most `max_tokens` tokens."""
    if state.is_complete():
        return []
    found = [search(state, max_tokens) for search in (complete_greedily, complete_by_exploring)]
    shortest = min((one for one in found if one is not None), key=len, default=None)
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
    while len(tokens) <= MAX_SHRINKAGE * max_tokens:
        if state.is_complete():
            return respell(start, tokens)
        following = next(promising_continuations(state), None)
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
            for following in promising_continuations(reached, thorough=True):
                ahead = reached.copy()
                is_legal = ahead.consume_tokens(following) == len(following)
                if is_legal and not ahead.in_optional_call:
                    waiting.setdefault(length + len(following), []).append(
                        (ahead, tokens + following)
                    )
    return None


def certainly_has_no_completion(state: GrammarState, max_tokens: int) -> bool:
    """Returns True only if certainly no completion has at most `max_tokens` tokens, as with a rule
    that never ends. Tries every legal text. Returns False where these are more than `_MAX_WAYS` at
    once."""
    waiting = deque([(0, state.copy())])
    while waiting and waiting[0][0] <= 2 * max_tokens:
        length, reached = waiting.popleft()
        following = all_continuations(reached)
        if reached.is_complete() or following is None or len(waiting) + len(following) > _MAX_WAYS:
            return False
        for tokens in following:
            ahead = reached.copy()
            if ahead.consume_tokens(tokens) == len(tokens):
                waiting.append((length + len(tokens), ahead))
    return True
