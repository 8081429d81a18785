"""How few tokens complete an answer from where it is, and cutting a path while they still fit.

llguidance tells which tokens are legal, not how far the end is. So the shortest completion that is
known is searched: what is forced, then what closes things. A block is let through together with a
plan of how the answer can be closed behind it, which the next block falls back on if it finds none.
"""

from collections import deque

import numpy as np

from vllm_dllm.grammar.continuations import continuations
from vllm_dllm.grammar.respelling import LONGER, respelled
from vllm_dllm.grammar.rows import Path
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.wandering import end_of, wandering_completion

MOST_STATES = 500
"""States that a search looks at before it gives up."""
_SAME_MASK = 2
"""States of equal length and mask that a search goes on from. They are mostly the same state."""
_FEW_WAYS = 16


def completion(state: GrammarState, most_tokens: int) -> list[int] | None:
    """Finds at most `most_tokens` tokens that complete the answer, without a stop token; None if it
    finds none. `[]`: the answer is complete. Does not move `state`, which remembers what was
    found."""
    if state.in_call_by_choice:
        return None
    known = state.known_completions
    if most_tokens not in known:
        found = cheap_completion(state, most_tokens, state)
        if found is None or len(found) > most_tokens:
            found = shortest_completion(state, most_tokens)
        known[most_tokens] = found
    return known[most_tokens]


def cheap_completion(
    state: GrammarState,
    most_tokens: int,
    start: GrammarState,  # the same, or one before it, whose plan may end in the same way
) -> list[int] | None:
    """Like `completion` in a tenth of the time, but what it finds may be longer than that, though
    there are shorter ones."""
    if state.in_call_by_choice:
        return None
    if state.has_ended or state.is_complete():
        return []
    found = greedy_completion(state, most_tokens)
    if found is None or len(found) > most_tokens:
        other = None if start.plan is None else end_of(start.plan, start, state)
        if other is None:  # a hundred times slower
            other = wandering_completion(state, most_tokens)
        found = min((way for way in (found, other) if way is not None), key=len, default=None)
    return found


def shortest_known(state: GrammarState, most_tokens: int) -> list[int] | None:
    """Like `completion`, and the shortest of what all ways of searching find."""
    if state.is_complete():
        return []
    ways = [search(state, most_tokens) for search in (greedy_completion, wandering_completion)]
    found = min((way for way in ways if way is not None), key=len, default=None)
    at_most = most_tokens if found is None else min(most_tokens, len(found) - 1)
    shorter = shortest_completion(state, at_most)
    found = found if shorter is None else shorter
    return found if found is not None and len(found) <= most_tokens else None


def greedy_completion(state: GrammarState, most_tokens: int) -> list[int] | None:
    """Takes the most promising token each time. Cheap, and right for most of JSON."""
    start, state = state, state.copy()
    tokens: list[int] = []
    while len(tokens) <= LONGER * most_tokens:
        if state.is_complete():
            return respelled(start, tokens)
        following = next(continuations(state), None)
        if following is None or state.consume_text(following) < len(following):
            return None
        tokens += following
    return None


def shortest_completion(state: GrammarState, most_tokens: int) -> list[int] | None:
    """The shortest that the search finds among `MOST_STATES` states, the nearest first."""
    if state.in_call_by_choice:
        return None
    waiting: dict[int, list[tuple[GrammarState, list[int]]]] = {0: [(state.copy(), [])]}
    num_states = 0
    while waiting and num_states < MOST_STATES:
        length = min(waiting)
        if length > most_tokens:
            return None
        seen: dict[bytes, int] = {}
        for at, tokens in waiting.pop(length):
            if at.is_complete():
                return tokens
            mask = at.mask().tobytes()
            seen[mask] = seen.get(mask, 0) + 1
            if seen[mask] > _SAME_MASK:
                continue
            num_states += 1
            for following in continuations(at, thorough=True):
                ahead = at.copy()
                is_taken = ahead.consume_text(following) == len(following)
                if is_taken and not ahead.in_call_by_choice:
                    waiting.setdefault(length + len(following), []).append(
                        (ahead, tokens + following)
                    )
    return None


def surely_has_none(state: GrammarState, most_tokens: int) -> bool:
    """Whether no answer ends within `most_tokens`, which a look at all ways shows where they are
    few, such as those of a rule that never ends. Whitespace apart, where there is a choice."""
    waiting = deque([(0, state.copy())])
    while waiting and waiting[0][0] <= 2 * most_tokens:
        length, at = waiting.popleft()
        following = _every_way(at)
        if at.is_complete() or following is None or len(waiting) + len(following) > _FEW_WAYS:
            return False
        for tokens in following:
            ahead = at.copy()
            if ahead.consume_text(tokens) == len(tokens):
                waiting.append((length + len(tokens), ahead))
    return True


def _every_way(state: GrammarState) -> list[list[int]] | None:
    """How it may go on, character by character. None: it cannot be told."""
    if forced := state.forced_tokens():
        return [forced]
    vocabulary, is_legal = state.vocabulary, state.closing_tokens()
    singles = np.concatenate((vocabulary.specials, vocabulary.characters))
    ways = singles[is_legal[singles]] if state.reasoning is None else singles[:0]
    begins = {vocabulary.token_bytes[token][:1] for token in np.flatnonzero(is_legal)}
    begins -= {vocabulary.token_bytes[token] for token in ways} | {b" ", b"\t", b"\r", b"\n", b""}
    return None if begins or not len(ways) else [[token] for token in ways.tolist()]


def cut_to_fit(
    start: GrammarState, path: Path, end: GrammarState, num_tokens: int
) -> list[int] | None:
    """None if the answer, which may get `num_tokens` tokens from `start` on, can still be completed
    behind the path, at `end`, or is inside of a call that the model chose to make: one that does
    not fit is cut, not finished for the model. Else as many of the path's tokens as allow that, by
    what is cheap to find, with the completion behind them. `start` gets the plan."""
    if end.in_call_by_choice and not path.is_stuck:
        return None
    tail = _tail(start, path.tokens, end, num_tokens)
    if tail is not None:
        start.plan = path.tokens + tail
        return None
    kept, rest = 0, completion(start, num_tokens)
    if rest is None:
        return None  # nothing fits: an answer that stays open is all there is
    start.plan = rest
    too_many = len(path.tokens)
    while too_many - kept > 1:
        middle = (kept + too_many) // 2
        tail = _tail(start, path.tokens[:middle], None, num_tokens)
        if tail is None:
            too_many = middle
        else:
            kept, rest = middle, tail
    start.plan = path.tokens[:kept] + rest
    return start.plan


def _tail(
    start: GrammarState,
    tokens: list[int],
    end: GrammarState | None,  # behind `tokens`, where all ways of completing it are tried
    num_tokens: int,
) -> list[int] | None:
    """What completes the answer behind `start` and `tokens` within `num_tokens`. `start` remembers
    it: the next step's path mostly begins in the same way."""
    key = (tuple(tokens), num_tokens, end is None)
    if key not in start.known_tails:
        left = num_tokens - len(tokens)
        found = cheap_completion(_after(start, tokens) if end is None else end, left, start)
        if found is None and end is not None:
            found = shortest_completion(end, left)
        is_short = found is not None and len(found) <= left
        start.known_tails[key] = found if is_short else None
    return start.known_tails[key]


def _after(start: GrammarState, tokens: list[int]) -> GrammarState:
    state = start.copy()
    for token in tokens:
        consumed = state.consume(token)
        assert consumed, "a path is legal"
    return state
