"""How an answer that is to be closed may go on."""

from collections.abc import Iterator

import numpy as np

from vllm_dllm.grammar.state import GrammarState, legal_tokens


def continuations(state: GrammarState, thorough: bool = False) -> Iterator[list[int]]:
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
    """Whether this is inside of a string or the like: most characters that the request does not
    exclude are legal."""
    characters = state.vocabulary.characters
    possible = len(characters)
    if state.exclusions is not None:
        allowed = legal_tokens(state.exclusions.allowed_mask, state.vocabulary.size)
        possible = int(allowed[characters].sum())
    return 2 * int(is_legal[characters].sum()) > possible
