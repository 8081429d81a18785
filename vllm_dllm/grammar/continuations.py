"""Lists tokens that a search for a completion tries next, first those that close the answer
soonest. Respells what was found character by character in fewer tokens."""

from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np

from vllm_dllm.grammar.masks import unpack_mask
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.vocabulary import GrammarVocabulary


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


MAX_SHRINKAGE = 4
"""Before it is respelt, a completion may have this many times as many tokens as afterwards."""


def respell(start: GrammarState, tokens: list[int]) -> list[int]:
    """Returns the text of `tokens`, which complete the answer at `start`, in as few tokens as
    possible. Returns `tokens` if no other spelling is legal. Does not move `start`. Whitespace is
    added where that saves tokens and is legal. Often `": "` is a token, and `":` is not."""
    vocabulary = start.vocabulary
    spellings = [_spell_with_fewest(vocabulary, tokens, vocabulary.token_by_bytes)]
    with_spaces = _spell_with_fewest(vocabulary, tokens, vocabulary.token_by_stripped_bytes)
    if len(with_spaces) < len(spellings[0]):
        spellings.insert(0, with_spaces)
    for spelling in spellings:
        end = start.copy()
        has_no_stop = start.stops.isdisjoint(spelling)
        if has_no_stop and end.consume_tokens(spelling) == len(spelling) and end.is_complete():
            return spelling
    return tokens


def _spell_with_fewest(
    vocabulary: GrammarVocabulary, tokens: list[int], token_by_bytes: Mapping[bytes, int]
) -> list[int]:
    """Returns the fewest tokens of `token_by_bytes` that spell the text of `tokens`. Special tokens
    stay where they are."""
    token_bytes = vocabulary.token_bytes
    fewest: list[int] = []
    for is_text, run in groupby(tokens, lambda token: bool(token_bytes[token])):
        if is_text:
            text = b"".join(token_bytes[token] for token in run)
            best: dict[int, list[int]] = {0: []}  # fewest tokens, by the end in the text
            for end in range(1, len(text) + 1):
                begins = [
                    begin
                    for begin in range(max(0, end - vocabulary.longest_token_bytes), end)
                    if begin in best and text[begin:end] in token_by_bytes
                ]
                if begins:
                    begin = min(begins, key=lambda begin: len(best[begin]))
                    best[end] = [*best[begin], token_by_bytes[text[begin:end]]]
            fewest += best[len(text)]
        else:
            fewest += run
    return fewest
