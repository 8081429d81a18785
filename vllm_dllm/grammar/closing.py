"""How few tokens complete an answer from where it is, and cutting a path while they still fit.

llguidance tells which tokens are legal, not how far the end is. So the shortest completion that is
known is searched: what is forced, then what closes things. A block is let through together with a
plan of how the answer can be closed behind it, which the next block falls back on if it finds none.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np

from vllm_dllm.grammar.rows import Path
from vllm_dllm.grammar.state import GrammarState, legal_tokens
from vllm_dllm.grammar.vocabulary import GrammarVocabulary

MOST_STATES = 500
"""States that a search looks at before it gives up."""
_SAME_MASK = 2
"""States of equal length and mask that a search goes on from. They are mostly the same state."""
_FEW_WAYS = 16
_LONGER = 4
"""A completion may be so many times longer before it is spelt with as few tokens as possible."""


def completion(state: GrammarState, most_tokens: int) -> list[int] | None:
    """At most `most_tokens` tokens that complete the answer, without a stop token; None if none are
    found. `[]`: it is complete. Does not move `state`, which remembers it."""
    if state.in_call_by_choice:
        return None
    known = state.known_completions
    if most_tokens not in known:
        found = cheap_completion(state, most_tokens)
        if found is None or len(found) > most_tokens:
            found = shortest_completion(state, most_tokens)
        if found is None and state.plan is not None and len(state.plan) <= most_tokens:
            found = state.plan
        known[most_tokens] = found
    return known[most_tokens]


def cheap_completion(state: GrammarState, most_tokens: int) -> list[int] | None:
    """Like `completion` in a tenth of the time, but what it finds may be longer than that, though
    there are shorter ones."""
    if state.in_call_by_choice:
        return None
    if state.has_ended or state.is_complete():
        return []
    found = greedy_completion(state, most_tokens)
    if found is None or len(found) > most_tokens:
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
    while len(tokens) <= _LONGER * most_tokens:
        if state.is_complete():
            return _respelled(start, tokens)
        following = next(_continuations(state), None)
        if following is None or state.consume_text(following) < len(following):
            return None
        tokens += following
    return None


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
    while len(tokens) <= max(_LONGER * most_tokens, MOST_STATES):
        if state.is_complete():
            return _respelled(start, _without_detours(start, tokens))
        following = state.ends_of_reasoning()[:1] or state.forced_tokens()
        is_legal = state.closing_tokens()
        if not following:
            exits = order[(is_legal & ~before)[order]].tolist()
            among = exits or order[is_legal[order]].tolist() or next(_continuations(state), [])
            times = taken[is_legal.tobytes()]
            following = [min(among, key=times.__getitem__)] if among else []
            times.update(following)
        if not following or state.consume_text(following) < len(following):
            return None
        tokens, before = tokens + following, is_legal
    return None


def _without_detours(start: GrammarState, tokens: list[int]) -> list[int]:
    """A shorter way to the same end: without some of the tokens, or with one in the place of
    several, where that leads to a state like a later one, as far as the mask tells. Nothing tells
    turns of a loop that counts apart, so the furthest such state is searched by halves."""
    masks = _masks_along(start, tokens)
    state, i = start.copy(), 0
    while i < len(tokens):
        best, end = tokens[i : i + 1], i + 1
        for head in ([], *_continuations(state)):
            ahead = state.copy()
            if len(head) > 1 or ahead.consume_text(head) < len(head):
                continue
            mask, first = ahead.mask().tobytes(), end + len(head) - len(best) + 1
            alike = [j for j in range(first, len(masks)) if masks[j] == mask]
            known, fails = -1, len(alike)
            middle = fails - 1  # the last of all is the most likely, where no loop counts
            while known < middle:
                if _completes(ahead, tokens[alike[middle] :]):
                    known = middle
                else:
                    fails = middle
                middle = (known + fails) // 2
            if known >= 0:
                best, end = head, alike[known]
        tokens = [*tokens[:i], *best, *tokens[end:]]
        masks = [*masks[: i + len(best)], *masks[end:]]
        if best:
            state.consume_text(best)
            i += 1
    return tokens


def _masks_along(start: GrammarState, tokens: list[int]) -> list[bytes]:
    """Before each of the tokens, and behind the last."""
    state, masks = start.copy(), [start.mask().tobytes()]
    for token in tokens:
        state.consume_text([token])
        masks.append(state.mask().tobytes())
    return masks


def _completes(state: GrammarState, tokens: list[int]) -> bool:
    end = state.copy()
    return end.consume_text(tokens) == len(tokens) and end.is_complete()


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
            for following in _continuations(at, thorough=True):
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


def _continuations(state: GrammarState, thorough: bool = False) -> Iterator[list[int]]:
    """What may come next, the most promising first. `thorough`: every legal character is tried, as
    where any of several letters goes on and one of them ends."""
    if state.reasoning is not None:
        yield from ([end] for end in state.ends_of_reasoning())
        return
    if forced := state.forced_tokens():
        yield forced
        return
    vocabulary, is_legal = state.vocabulary, state.closing_tokens()
    characters = vocabulary.characters
    orders: tuple[tuple[np.ndarray, int], ...]
    if _is_free_text(state, is_legal):
        orders = (
            (vocabulary.specials, 2),
            (vocabulary.ends_of_strings, 6),
            (vocabulary.longest_first, 2),
        )
    else:
        orders = (
            (vocabulary.specials, 2),
            (vocabulary.closers, 2),
            (characters, 6),
            (vocabulary.structure, 4),
            (vocabulary.longest_first, 4),
        )
    if thorough:
        orders = (*orders, (characters, len(characters)), (vocabulary.blanks, 2))
    tried: set[int] = set()
    for order, count in orders:
        for token in order[is_legal[order]][:count].tolist():
            if token not in tried:
                tried.add(token)
                yield [token]


def _is_free_text(
    state: GrammarState,
    is_legal: np.ndarray,  # [V] bool
) -> bool:
    """In a string or the like: most characters that the request does not exclude are legal."""
    characters = state.vocabulary.characters
    possible = len(characters)
    if state.exclusions is not None:
        allowed = legal_tokens(state.exclusions.allowed_words, state.vocabulary.size)
        possible = int(allowed[characters].sum())
    return 2 * int(is_legal[characters].sum()) > possible


def _respelled(start: GrammarState, tokens: list[int]) -> list[int]:
    """The same bytes in as few tokens as spell them, since a grammar is one of bytes, or in fewer
    still with whitespace between them, if that is legal: many tokenizers have a token for `": "`
    and none for `":`. The tokens as they are, if one of those is excluded or would end the answer,
    or they are too few."""
    vocabulary = start.vocabulary
    ways = [_fewest(vocabulary, tokens, vocabulary.by_bytes)]
    with_blanks = _fewest(vocabulary, tokens, vocabulary.by_bytes_but_blanks)
    if len(with_blanks) < len(ways[0]):
        ways.insert(0, with_blanks)
    for fewest in ways:
        end = start.copy()
        is_free = start.stops.isdisjoint(fewest) and end.consume_text(fewest) == len(fewest)
        if is_free and end.is_complete():
            return fewest
    return tokens


def _fewest(
    vocabulary: GrammarVocabulary, tokens: list[int], spelling: Mapping[bytes, int]
) -> list[int]:
    """Other tokens with the text of `tokens`, as few as `spelling` has them for."""
    token_bytes = vocabulary.token_bytes
    fewest: list[int] = []
    for is_text, run in groupby(tokens, lambda token: bool(token_bytes[token])):
        if is_text:
            text = b"".join(token_bytes[token] for token in run)
            fewest += _spelt(text, spelling, vocabulary.longest)
        else:
            fewest += run
    return fewest


def _spelt(text: bytes, spelling: Mapping[bytes, int], longest: int) -> list[int]:
    spelt: dict[int, list[int]] = {0: []}  # by the end in the text
    for end in range(1, len(text) + 1):
        begins = [
            begin
            for begin in range(max(0, end - longest), end)
            if begin in spelt and text[begin:end] in spelling
        ]
        if begins:
            begin = min(begins, key=lambda begin: len(spelt[begin]))
            spelt[end] = [*spelt[begin], spelling[text[begin:end]]]
    return spelt[len(text)]


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
        found = cheap_completion(_after(start, tokens) if end is None else end, left)
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
