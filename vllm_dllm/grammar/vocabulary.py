"""Describes a tokenizer to the grammars: its tokens' bytes, and which tokens close or separate
things.

Arrays are computed once, at first use. Arrays of tokens are [n] int64.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer

from vllm_dllm.grammar.gemma_calls import CALL, END
from vllm_dllm.grammar.masks import pack_mask

_SPACE = b" \t\r\n"
_CHARACTERS = [b'"', *(bytes([c]) for c in (*range(0x30, 0x3A), *range(0x21, 0x7F)) if c != 0x22)]


class GrammarVocabulary:
    """The vocabulary of one llguidance tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.mask_length = (self.size + 31) // 32  # W

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each of the V tokens; empty for special tokens, which no text spells."""
        tokenizer = self.tokenizer
        return [
            b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
            for token in range(self.size)
        ]

    @cached_property
    def full_mask(self) -> np.ndarray:
        """The mask [W] uint32 of all tokens. Do not change it."""
        return pack_mask(np.ones(self.size, dtype=bool))

    @cached_property
    def num_spaces(self) -> np.ndarray:
        """[V] int32: the characters of each token that is whitespace alone; 0 for other tokens."""
        counts = [len(text) if not text.strip(_SPACE) else 0 for text in self.token_bytes]
        return np.array(counts, dtype=np.int32)

    @cached_property
    def call_begin(self) -> int | None:
        """The token that begins a tool call of Gemma 4; None if the vocabulary lacks it."""
        return self._find_special_token(CALL)

    @cached_property
    def call_end(self) -> int | None:
        """The token that ends a tool call of Gemma 4; None if the vocabulary lacks it."""
        return self._find_special_token(END)

    def _find_special_token(self, name: str) -> int | None:
        """Returns the special token with the name `name`; None if the vocabulary lacks it."""
        tokens = self.tokenizer.tokenize_str(name)
        is_one = len(tokens) == 1 and self.tokenizer.decode_str(tokens) == name
        return tokens[0] if is_one else None

    # --- tokens that a search for a completion tries ------------------------------------------

    @cached_property
    def special_tokens(self) -> np.ndarray:
        """All special tokens. Where a grammar allows one, it mostly ends something."""
        is_special = self.tokenizer.is_special_token
        return np.array([t for t in range(self.size) if is_special(t)], dtype=np.int64)

    @cached_property
    def bracket_closers(self) -> np.ndarray:
        """Tokens of nothing but closing brackets `}])>`, the longest first. Outside of strings they
        may close arrays and objects. Special tokens, whose bytes are empty, come last."""
        return self._find_longest_first(lambda text: not text.strip(b"}])>"))

    @cached_property
    def string_closers(self) -> np.ndarray:
        """Tokens of a quotation mark and perhaps closing brackets, which may end a string. Those
        that also close the most brackets come first."""
        return self._find_longest_first(
            lambda text: text[:1] == b'"' and not text[1:].strip(b"}])>")
        )

    @cached_property
    def punctuation(self) -> np.ndarray:
        """Tokens of two or more characters, all JSON's punctuation or spaces; the longest first."""
        return self._find_longest_first(lambda text: len(text) > 1 and not text.strip(b'{["]}:, '))

    @cached_property
    def spaces(self) -> np.ndarray:
        """Tokens of whitespace alone, the shortest first."""
        spaces = np.flatnonzero(self.num_spaces)
        return spaces[np.argsort(self.num_spaces[spaces], kind="stable")]

    @cached_property
    def characters(self) -> np.ndarray:
        """Tokens of one visible ASCII character: the quotation mark, then digits, then others."""
        tokens = [t for t, text in enumerate(self.token_bytes) if text in _CHARACTERS]
        order = sorted(tokens, key=lambda t: _CHARACTERS.index(self.token_bytes[t]))
        return np.array(order, dtype=np.int64)

    @cached_property
    def longest_first(self) -> np.ndarray:
        """All V tokens, the longest first."""
        return self._find_longest_first(lambda text: True)

    def _find_longest_first(self, is_wanted: Callable[[bytes], bool]) -> np.ndarray:
        """Returns the tokens [n] int64 whose bytes `is_wanted` accepts, the longest first."""
        tokens = [t for t, text in enumerate(self.token_bytes) if is_wanted(text)]
        tokens.sort(key=lambda t: -len(self.token_bytes[t]))
        return np.array(tokens, dtype=np.int64)

    # --- tokens by their text -----------------------------------------------------------------

    @cached_property
    def token_by_bytes(self) -> dict[bytes, int]:
        """Bytes -> a token with these bytes. Special tokens are left out."""
        return {text: token for token, text in enumerate(self.token_bytes) if text}

    @cached_property
    def token_by_stripped_bytes(self) -> dict[bytes, int]:
        """Bytes -> a token that has these bytes once whitespace is removed from it. A token with
        exactly these bytes wins. So `":` finds the token `": "` if `":` is no token."""
        tokens = {
            text.translate(None, _SPACE): token for text, token in self.token_by_bytes.items()
        }
        tokens.pop(b"", None)
        return {**tokens, **self.token_by_bytes}

    @cached_property
    def longest_token_bytes(self) -> int:
        """The length of the longest token, in bytes."""
        return max(map(len, self.token_bytes))
