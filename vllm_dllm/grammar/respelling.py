"""A completion that was found character by character, in as few tokens as spell it."""

from collections.abc import Mapping
from itertools import groupby

from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.vocabulary import GrammarVocabulary

LONGER = 4
"""A completion may be so many times longer before it is respelt."""


def respelled(start: GrammarState, tokens: list[int]) -> list[int]:
    """The same bytes in as few tokens as spell them, since a grammar is one of bytes, or in fewer
    still with whitespace between them, if that is legal: many tokenizers have a token for `": "`
    and none for `":`. The tokens as they are, if one of those is excluded or would end the answer,
    or they are too few."""
    vocabulary = start.vocabulary
    ways = [_fewest(vocabulary, tokens, vocabulary.by_bytes)]
    with_blanks = _fewest(vocabulary, tokens, vocabulary.by_bytes_or_stripped)
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
    """The fewest tokens of `spelling` whose bytes are `text`; the longest has `longest`."""
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
