"""How far an answer has come in its grammar."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from vllm_dllm.grammar.exclusions import Exclusions
from vllm_dllm.grammar.reasoning import Reasoning
from vllm_dllm.grammar.vocabulary import GrammarVocabulary

MOST_SPACES = 32
"""Characters of whitespace in a row, from tokens of nothing else. JSON allows any number, and a
model that is unsure of what follows would write it to the end of the canvas."""


class GrammarState:
    """A grammar after some tokens of an answer. `has_ended`: one of them ended it; what follows is
    free.

    Stop tokens are kept from the matcher: they are legal where the grammar is complete, whichever
    they are, and where they are text of the grammar. So is reasoning, in which all other tokens are
    legal.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: GrammarVocabulary,
        stops: frozenset[int],  # none that is excluded
        exclusions: Exclusions | None = None,
        min_tokens: int = 0,
        reasoning: Reasoning | None = None,
    ) -> None:
        self._matcher = matcher
        self.vocabulary = vocabulary
        self.stops = stops
        self.exclusions = exclusions
        self.min_tokens = min_tokens  # still to come before it may end where it may go on as well
        # That is still to end before the grammar begins, and that the first token may open.
        is_open = reasoning is not None and reasoning.is_open
        self.reasoning = reasoning if is_open else None
        self._may_think = None if is_open else reasoning
        self.in_call_by_choice = False
        """Inside of a call though the answer could have gone on without it: such a call is the
        model's own, or is left open."""
        self._before: tuple[int, ...] = ()  # the last tokens, as many as exclusions ask for
        self.has_ended = False
        self._has_begun = False  # some token has come
        self.spaces = 0  # characters of whitespace that were the last tokens
        self.plan: list[int] | None = None  # tokens that complete the answer from here, if known
        # From here, see `closing`: by the most tokens, and behind some tokens.
        self.known_completions: dict[int, list[int] | None] = {}
        self.known_tails: dict[tuple[tuple[int, ...], int, bool], list[int] | None] = {}

    def copy(self) -> "GrammarState":
        matcher = self._matcher.deep_copy()
        other = GrammarState(
            matcher,
            self.vocabulary,
            self.stops,
            self.exclusions,
            self.min_tokens,
        )
        other.reasoning, other._may_think = self.reasoning, self._may_think
        other.in_call_by_choice = self.in_call_by_choice
        other.has_ended, other.spaces = self.has_ended, self.spaces
        other._before, other._has_begun = self._before, self._has_begun
        return other

    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._is_accepting() and not self._must_go_on()

    def _is_accepting(self) -> bool:
        return self.reasoning is None and self._matcher.is_accepting()

    def _must_go_on(self) -> bool:
        """Whether `min_tokens` are still to come, and there is something that may."""
        return self.min_tokens > 0 and bool(self._without_stops(self._legal()).any())

    @property
    def error(self) -> str:
        """Why the matcher gave up, if it did: some limit of llguidance."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        if token in self.stops:
            return self._may_stop_at(token)
        if self._up_to_excluded([token]) != [token]:
            return False
        if self.reasoning is not None and token not in self.reasoning.opening:
            return not (self._has_begun and token in self.reasoning.begins)
        if self._may_think is not None and token in self._may_think.begins:
            return True
        return self._matcher.validate_tokens([token]) == 1

    def consume(self, token: int) -> bool:
        """False: the token is illegal here, and nothing has changed."""
        if token in self.stops:
            if self._may_stop_at(token):
                self.has_ended = True
                self._forget()
            return self.has_ended
        return self.consume_text([token]) == 1

    def _may_stop_at(self, stop: int) -> bool:
        """Whether `stop` may come next: the form is complete, or has this token in it."""
        fits = self._is_accepting() or self._matcher.validate_tokens([stop]) == 1
        return self.reasoning is None and fits and not self._must_go_on()

    def consume_text(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, none of which is a stop token, were legal and consumed."""
        tokens, begin = list(tokens), self.vocabulary.call_tokens[0]
        if begin not in tokens:
            return self._consume(tokens)
        at = tokens.index(begin)
        if (count := self._consume(tokens[:at])) < at:
            return count
        is_choice = self._can_do_without(begin)
        if not self._consume([begin]):
            return at
        self.in_call_by_choice = is_choice
        return at + 1 + self.consume_text(tokens[at + 1 :])

    def _can_do_without(self, token: int) -> bool:
        """Whether something else may follow the reasoning, if there is any, or nothing."""
        others = self._of_form()
        others[token >> 5] &= ~np.uint32(1 << (token & 31))
        return self._matcher.is_accepting() or bool(others.any())

    def _consume(self, tokens: list[int]) -> int:
        admitted = self._up_to_excluded(tokens)
        count = self._think(admitted)
        if count < len(admitted) and self.reasoning is None:
            count += self._matcher.try_consume_tokens(admitted[count:])
        if count:
            self._has_begun, self._may_think = True, None
            if self.vocabulary.call_tokens[1] in admitted[:count]:
                self.in_call_by_choice = False
            self._forget()
            self.min_tokens -= count
            if self.plan is not None:
                is_kept = self.plan[:count] == admitted[:count]
                self.plan = self.plan[count:] if is_kept else None
        for token in admitted[:count]:
            spaces = int(self.vocabulary.spaces[token])
            self.spaces = self.spaces + spaces if spaces else 0
        if self.exclusions is not None and self.exclusions.reach:
            self._before = (*self._before, *admitted[:count])[-self.exclusions.reach :]
        return count

    def _think(self, tokens: list[int]) -> int:
        """How many of the tokens are reasoning, which the last of them may end."""
        if self._may_think is not None and tokens and tokens[0] in self._may_think.begins:
            self.reasoning = self._may_think
        if self.reasoning is None:
            return 0
        for i, token in enumerate(tokens):
            if token in self.reasoning.begins and (self._has_begun or i):
                return i
            if token in self.reasoning.opening:
                if self._matcher.validate_tokens([token]) == 1:
                    self.reasoning = None
                return i
            if token in self.reasoning.ends:
                self.reasoning = None
                return i + 1
        return len(tokens)

    def ends_of_reasoning(self) -> list[int]:
        """The tokens that may end it here; first those that leave the answer all its choices."""
        if self.reasoning is None:
            return []
        opening = self.reasoning.opening
        ends = sorted(self.reasoning.ends, key=lambda end: (end in opening, end))
        return [end for end in ends if self.allows(end)]

    def _forget(self) -> None:
        self.known_completions.clear()
        self.known_tails.clear()

    def _up_to_excluded(self, tokens: list[int]) -> list[int]:
        """Returns the tokens before the first that is excluded."""
        if self.exclusions is None:
            return tokens
        before = list(self._before)
        for i, token in enumerate(tokens):
            if self.exclusions.excludes(token, before):
                return tokens[:i]
            before.append(token)
        return tokens

    def mask(self) -> np.ndarray:
        """[W] uint32: the legal tokens."""
        words = self._legal()
        if self.min_tokens > 0:
            others = self._without_stops(words)
            if others.any():
                return others
        if self._is_accepting():
            for stop in self.stops:
                words[stop >> 5] |= np.uint32(1 << (stop & 31))
        return words

    def _legal(self) -> np.ndarray:
        """[W] uint32: what the grammar lets come next, and the request does not exclude."""
        if self.reasoning is not None:
            return self._free()
        words = self._of_form()
        for token in () if self._may_think is None else self._may_think.begins:
            if self._up_to_excluded([token]):
                words[token >> 5] |= np.uint32(1 << (token & 31))
        return words

    def closing_tokens(self) -> np.ndarray:
        """[V] bool: the legal tokens that may close an answer. None ends it, and none begins
        reasoning or a call that need not come."""
        words = self._of_form() if self.reasoning is None else self._free()
        is_legal = legal_tokens(self._without_stops(words), self.vocabulary.size)
        begin = self.vocabulary.call_tokens[0]
        if begin is not None and is_legal[begin] and self._can_do_without(begin):
            is_legal[begin] = False
        return is_legal

    def _of_form(self) -> np.ndarray:
        """[W] uint32: what the grammar lets come next, apart from reasoning."""
        words = np.zeros(self.vocabulary.num_words, dtype=np.uint32)
        address = words.__array_interface__["data"][0]  # a tenth of the time of `words.ctypes`
        self._matcher.unsafe_compute_mask_ptr(address, words.nbytes)
        if self.exclusions is not None:
            self.exclusions.remove_from(words, self._before)
            if not words.any():
                self._add_other_spellings(words)
        return words

    def _free(self) -> np.ndarray:
        """[W] uint32: what may come next in reasoning."""
        words = self._without_stops(self.vocabulary.all_words)
        if self.exclusions is not None:
            self.exclusions.remove_from(words, self._before)
        assert self.reasoning is not None
        for token in self.reasoning.opening | self.reasoning.begins:
            if not self.allows(token):
                words[token >> 5] &= ~np.uint32(1 << (token & 31))
        return words

    def _without_stops(self, words: np.ndarray) -> np.ndarray:
        words = words.copy()
        for stop in {*self.stops, self.vocabulary.tokenizer.eos_token}:
            words[stop >> 5] &= ~np.uint32(1 << (stop & 31))
        return words

    def _add_other_spellings(self, words: np.ndarray) -> None:
        """Where the text is forced, llguidance's mask has nothing but the tokenizer's own spelling.
        If that is excluded, any other token with which the text begins will do."""
        text = self._matcher.compute_ff_bytes()
        for end in range(1, min(len(text), self.vocabulary.longest) + 1):
            token = self.vocabulary.by_bytes.get(text[:end])
            if token is not None and self._up_to_excluded([token]):
                words[token >> 5] |= np.uint32(1 << (token & 31))

    def forced_tokens(self) -> list[int]:
        """Tokens that come next whatever the model says, up to the first that would end the answer
        or is excluded; none where the tokenizer leaves a choice of how to spell what is forced."""
        if self.has_ended or self.reasoning is not None or self._may_think is not None:
            return []
        tokens = self._up_to_excluded(self._matcher.compute_ff_tokens())
        stop = next((i for i, token in enumerate(tokens) if token in self.stops), None)
        return tokens[:stop]


def words_of(size: int, tokens: Sequence[int]) -> np.ndarray:
    """[W] uint32: a mask of these tokens, of a vocabulary of `size`."""
    words = np.zeros(-(-size // 32), dtype=np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words


def legal_among(words: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[...] bool: which of the tokens [...] the mask [W] has."""
    return (words[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 == 1


def legal_tokens(words: np.ndarray, size: int) -> np.ndarray:
    """[V] bool."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:size].view(bool)


def is_legal(words: np.ndarray, token: int) -> bool:
    """`legal_among` of one token, in less time."""
    return bool(words.item(token >> 5) >> (token & 31) & 1)


def is_forced(words: np.ndarray) -> bool:
    """Whether the mask has one token alone."""
    return int.from_bytes(words.tobytes()).bit_count() == 1
