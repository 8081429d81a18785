"""Cuts a path through a canvas where the answer can still be completed within its tokens.

A path passes together with a plan: tokens that complete the answer after it. The next canvas falls
back on the plan if it finds no other completion.
"""

from vllm_dllm.grammar.completion import (
    find_completion,
    find_completion_quickly,
    search_shortest_first,
)
from vllm_dllm.grammar.rows import LegalPath
from vllm_dllm.grammar.state import GrammarState


def cut_to_fit(
    start: GrammarState,  # before the path; its plan and its cached completions are changed
    path: LegalPath,
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
        found = _find_tail(start, path.tokens[:middle], None, num_tokens)
        if found is None:
            too_many = middle
        else:
            num_kept, tail = middle, found
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
        found = find_completion_quickly(state, max_tokens, start)
        if found is None and end is not None:
            found = search_shortest_first(end, max_tokens)
        is_short = found is not None and len(found) <= max_tokens
        start.known_tails[key] = found if is_short else None
    return start.known_tails[key]
