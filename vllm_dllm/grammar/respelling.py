"""Respells a completion that was found character by character in fewer tokens."""

from collections.abc import Mapping
from itertools import groupby

from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.vocabulary import GrammarVocabulary

MAX_SHRINKAGE = 4
"""Before it is respelt, a completion may have this many times as many tokens as afterwards."""


def respell(start: GrammarState, tokens: list[int]) -> list[int]:
    """Returns the text of `tokens`, which complete the answer at `start`, in as few tokens as
    possible. Returns `tokens` if no other spelling is legal. Does not move `start`.

    Whitespace is added where that saves tokens and is legal. Often `": "` is a token, and `":` is
    not.
    """
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
