"""What the grammars know of a tokenizer: its tokens' bytes, and which of them end things."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer

from vllm_dllm.grammar.gemma_calls import CALL, END

_SPACE = b" \t\r\n"
_CHARACTERS = [b'"', *(bytes([c]) for c in (*range(0x30, 0x3A), *range(0x21, 0x7F)) if c != 0x22)]


class GrammarVocabulary:
    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.num_words = (self.size + 31) // 32

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """[V]; empty for special tokens, which no text spells."""
        tokenizer = self.tokenizer
        return [
            b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
            for token in range(self.size)
        ]

    @cached_property
    def all_words(self) -> np.ndarray:
        """[W] uint32, a mask of all tokens. Not to be changed."""
        bits = np.arange(self.num_words * 32) < self.size
        return np.packbits(bits, bitorder="little").view(np.uint32)

    @cached_property
    def spaces(self) -> np.ndarray:
        """[V] int32: characters of tokens that are whitespace alone, 0 for the others."""
        found = [len(text) if not text.strip(_SPACE) else 0 for text in self.token_bytes]
        return np.array(found, dtype=np.int32)

    @cached_property
    def closers(self) -> np.ndarray:
        """Tokens that may close arrays and objects outside of strings, the longest first."""
        return self._longest_of(lambda text: not text.strip(b"}])>"))

    @cached_property
    def ends_of_strings(self) -> np.ndarray:
        """Tokens that may end a string, those first that close the most behind it."""
        return self._longest_of(lambda text: text[:1] == b'"' and not text[1:].strip(b"}])>"))

    @cached_property
    def specials(self) -> np.ndarray:
        """Special tokens. Where a grammar has one, it mostly ends something."""
        is_special = self.tokenizer.is_special_token
        return np.array([t for t in range(self.size) if is_special(t)], dtype=np.int64)

    @cached_property
    def call_tokens(self) -> tuple[int | None, int | None]:
        """The tokens that begin and end a call of Gemma 4; None where the vocabulary has none."""
        return self._special(CALL), self._special(END)

    def _special(self, name: str) -> int | None:
        tokens = self.tokenizer.tokenize_str(name)
        is_one = len(tokens) == 1 and self.tokenizer.decode_str(tokens) == name
        return tokens[0] if is_one else None

    @cached_property
    def structure(self) -> np.ndarray:
        """Tokens of several signs that part or open things, the longest first."""
        return self._longest_of(lambda text: len(text) > 1 and not text.strip(b'{["]}:, '))

    @cached_property
    def blanks(self) -> np.ndarray:
        """Tokens of whitespace alone, the shortest first."""
        blank = np.flatnonzero(self.spaces)
        return blank[np.argsort(self.spaces[blank], kind="stable")]

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self.token_bytes) if text}

    @cached_property
    def by_bytes_or_stripped(self) -> dict[bytes, int]:
        """Tokens by their bytes, and those with whitespace, such as `": "`, by their bytes
        without it, too. Where two tokens compete, the one that is spelt so wins."""
        found = {text.translate(None, _SPACE): token for text, token in self.by_bytes.items()}
        found.pop(b"", None)
        return {**found, **self.by_bytes}

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.token_bytes))

    @cached_property
    def longest_first(self) -> np.ndarray:
        """[V] int64: all tokens."""
        return self._longest_of(lambda text: True)

    @cached_property
    def characters(self) -> np.ndarray:
        """Tokens of one visible ASCII character: quotation mark, digits, the others."""
        tokens = [t for t, text in enumerate(self.token_bytes) if text in _CHARACTERS]
        order = sorted(tokens, key=lambda t: _CHARACTERS.index(self.token_bytes[t]))
        return np.array(order, dtype=np.int64)

    def _longest_of(self, is_one: Callable[[bytes], bool]) -> np.ndarray:
        tokens = [t for t, text in enumerate(self.token_bytes) if is_one(text)]
        tokens.sort(key=lambda t: -len(self.token_bytes[t]))
        return np.array(tokens, dtype=np.int64)
