"""Lists tokens that a search for a completion tries next, first those that close the answer
soonest."""

from collections.abc import Iterator

import numpy as np

from vllm_dllm.grammar.masks import unpack_mask
from vllm_dllm.grammar.state import GrammarState


def promising_continuations(state: GrammarState, thorough: bool = False) -> Iterator[list[int]]:
    """Yields lists of tokens that may come next, the most promising first: all forced tokens in one
    list, or single tokens. `thorough` adds every legal character: of several letters that are
    legal, perhaps only one leads to the end."""
    if state.reasoning is not None:
        yield from ([end] for end in state.reasoning_ends())
        return
    if forced := state.forced_tokens():
        yield forced
        return
    vocabulary, is_legal = state.vocabulary, state.closing_tokens()
    characters = vocabulary.characters
    orders: tuple[tuple[np.ndarray, int], ...]  # tokens in order, and how many to try
    num_possible = len(characters)
    if state.exclusions is not None:
        allowed = unpack_mask(state.exclusions.allowed_mask, vocabulary.size)
        num_possible = int(allowed[characters].sum())
    # Inside of a string or similar free text: more than half of the characters are legal that the
    # request does not exclude.
    if 2 * int(is_legal[characters].sum()) > num_possible:
        orders = (
            (vocabulary.special_tokens, 2),
            (vocabulary.string_closers, 6),
            (vocabulary.longest_first, 2),
        )
    else:
        orders = (
            (vocabulary.special_tokens, 2),
            (vocabulary.bracket_closers, 2),
            (characters, 6),
            (vocabulary.punctuation, 4),
            (vocabulary.longest_first, 4),
        )
    if thorough:
        orders = (*orders, (characters, len(characters)), (vocabulary.spaces, 2))
    tried: set[int] = set()
    for order, count in orders:
        for token in order[is_legal[order]][:count].tolist():
            if token not in tried:
                tried.add(token)
                yield [token]


def all_continuations(state: GrammarState) -> list[list[int]] | None:
    """Returns everything that may come next: the forced tokens, or each legal character and special
    token. Returns None if these do not cover all legal texts; whitespace does not count."""
    if forced := state.forced_tokens():
        return [forced]
    vocabulary, is_legal = state.vocabulary, state.closing_tokens()
    singles = np.concatenate((vocabulary.special_tokens, vocabulary.characters))
    tokens = singles[is_legal[singles]] if state.reasoning is None else singles[:0]
    first_bytes = {vocabulary.token_bytes[token][:1] for token in np.flatnonzero(is_legal)}
    first_bytes -= {vocabulary.token_bytes[token] for token in tokens}
    first_bytes -= {b" ", b"\t", b"\r", b"\n", b""}
    return None if first_bytes or not len(tokens) else [[token] for token in tokens.tolist()]
