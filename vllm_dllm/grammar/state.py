"""How far an answer has come in its grammar: which tokens may come next, and consuming them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from vllm_dllm.grammar.masks import Exclusions, add_tokens_, remove_tokens_, unpack_mask
from vllm_dllm.grammar.vocabulary import GrammarVocabulary


@dataclass(frozen=True)
class Reasoning:
    """Names the tokens around the reasoning before an answer that has a form: free text, up to a
    token that ends it."""

    ends: frozenset[int]  # tokens each of which ends the reasoning
    opening: frozenset[int] = frozenset()
    """The tokens of `ends` that are also the first token of the answer, such as one that begins a
    tool call."""
    begins: frozenset[int] = frozenset()
    """Tokens that begin the reasoning. Only the first token of all may be one of them: a parser
    would count text before it as a part of the answer, and that text has no form."""
    is_open: bool = True
    """Whether the prompt has already begun the reasoning. If not, a first token of `begins` begins
    it; any other first token belongs to the answer."""


class GrammarState:
    """The place that an answer has reached in its grammar, after some of its tokens.

    It adds to llguidance's matcher what the matcher never sees:
    - stop tokens, which are legal where the grammar is complete;
    - reasoning before the answer, in which all other tokens are legal;
    - the tokens that the request excludes.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: GrammarVocabulary,
        stops: frozenset[int],  # tokens that end the answer; excluded ones are left out
        exclusions: Exclusions | None = None,
        min_tokens: int = 0,
        reasoning: Reasoning | None = None,
    ) -> None:
        """Takes over `matcher`, which nothing else may move."""
        self._matcher = matcher
        self.vocabulary = vocabulary
        self.stops = stops
        self.exclusions = exclusions
        self.min_tokens = min_tokens
        """How many tokens have to come before one may end an answer that could go on."""
        is_open = reasoning is not None and reasoning.is_open
        self.reasoning = reasoning if is_open else None
        """The reasoning that the answer is in; the grammar begins after it."""
        self._optional_reasoning = None if is_open else reasoning  # the first token may open it
        self.in_optional_call = False
        """Whether a tool call has begun that the grammar did not demand. Such a call is the model's
        own choice: nothing but the model completes it."""
        self._previous: tuple[int, ...] = ()  # the last tokens, as many as exclusions look at
        self.has_ended = False
        """Whether a token has ended the answer. Any tokens may follow."""
        self._has_begun = False  # a token has been consumed
        self.num_spaces = 0
        """Characters of whitespace in the tokens of whitespace alone that came last."""
        self.plan: list[int] | None = None
        """Tokens that complete the answer from here, if some are known."""
        # Caches of `completion.find_completion` and `canvas._find_tail`, by their arguments.
        self.known_completions: dict[int, list[int] | None] = {}
        self.known_tails: dict[tuple[tuple[int, ...], int, bool], list[int] | None] = {}

    def copy(self) -> "GrammarState":
        """Returns another state at the same place, which moves by itself. The plan and the cached
        completions are not copied."""
        other = GrammarState.__new__(GrammarState)
        vars(other).update(vars(self))
        other._matcher = self._matcher.deep_copy()
        other.plan, other.known_completions, other.known_tails = None, {}, {}
        return other

    @property
    def error(self) -> str:
        """The matcher's error if it gave up, mostly at a limit of llguidance; else ""."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def is_complete(self) -> bool:
        """Returns whether the answer may end here: the grammar is complete and `min_tokens` are
        reached."""
        return self._is_accepting() and not self._must_go_on()

    def _is_accepting(self) -> bool:
        """Returns whether the grammar is complete here; `min_tokens` do not count."""
        return self.reasoning is None and self._matcher.is_accepting()

    def _must_go_on(self) -> bool:
        """Returns whether `min_tokens` are not reached and a token other than stops is legal."""
        return self.min_tokens > 0 and bool(self._without_stops(self._mask_but_stops()).any())

    # --- consuming tokens -------------------------------------------------------------------

    def allows_token(self, token: int) -> bool:
        """Returns whether `token` may come next. Changes nothing."""
        if token in self.stops:
            return self._may_stop_at(token)
        if self._before_first_excluded([token]) != [token]:
            return False
        if self.reasoning is not None and token not in self.reasoning.opening:
            return not (self._has_begun and token in self.reasoning.begins)
        if self._optional_reasoning is not None and token in self._optional_reasoning.begins:
            return True
        return self._matcher.validate_tokens([token]) == 1

    def consume_token(self, token: int) -> bool:
        """Moves on by `token`, which may be a stop token, and returns True. If the token is illegal
        here, returns False and changes nothing."""
        if token in self.stops:
            if self._may_stop_at(token):
                self.has_ended = True
                self._forget_completions()
            return self.has_ended
        return self.consume_tokens([token]) == 1

    def _may_stop_at(self, stop: int) -> bool:
        """Returns whether the stop may come next: the grammar is complete, or has it as text."""
        fits = self._is_accepting() or self._matcher.validate_tokens([stop]) == 1
        return self.reasoning is None and fits and not self._must_go_on()

    def consume_tokens(self, tokens: Sequence[int]) -> int:
        """Moves on by the tokens before the first illegal one, and returns their number. None of
        the tokens may be a stop token."""
        tokens, call_begin = list(tokens), self.vocabulary.call_begin
        if call_begin not in tokens:
            return self._consume_outside_calls(tokens)
        at = tokens.index(call_begin)
        if (count := self._consume_outside_calls(tokens[:at])) < at:
            return count
        is_optional = self._is_optional(call_begin)
        if not self._consume_outside_calls([call_begin]):
            return at
        self.in_optional_call = is_optional
        return at + 1 + self.consume_tokens(tokens[at + 1 :])

    def _is_optional(self, token: int) -> bool:
        """Returns whether the grammar allows another token in the place of `token`, or none."""
        others = self._grammar_mask()
        remove_tokens_(others, [token])
        return self._matcher.is_accepting() or bool(others.any())

    def _consume_outside_calls(self, tokens: list[int]) -> int:
        """Moves on as `consume_tokens` does, but does not notice where a call begins."""
        admitted = self._before_first_excluded(tokens)
        count = self._consume_reasoning(admitted)
        if count < len(admitted) and self.reasoning is None:
            count += self._matcher.try_consume_tokens(admitted[count:])
        if count:
            self._has_begun, self._optional_reasoning = True, None
            if self.vocabulary.call_end in admitted[:count]:
                self.in_optional_call = False
            self._forget_completions()
            self.min_tokens -= count
            if self.plan is not None:
                is_kept = self.plan[:count] == admitted[:count]
                self.plan = self.plan[count:] if is_kept else None
        for token in admitted[:count]:
            spaces = int(self.vocabulary.num_spaces[token])
            self.num_spaces = self.num_spaces + spaces if spaces else 0
        if self.exclusions is not None and self.exclusions.lookback:
            self._previous = (*self._previous, *admitted[:count])[-self.exclusions.lookback :]
        return count

    def _consume_reasoning(self, tokens: list[int]) -> int:
        """Returns how many of the tokens, from the first on, are reasoning. Sets `reasoning` where
        the first token begins it, and to None where a token ends it."""
        optional = self._optional_reasoning
        if optional is not None and tokens and tokens[0] in optional.begins:
            self.reasoning = optional
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

    def _forget_completions(self) -> None:
        """Clears the completions that searches have cached, since the state has moved."""
        self.known_completions.clear()
        self.known_tails.clear()

    def _before_first_excluded(self, tokens: list[int]) -> list[int]:
        """Returns the tokens before the first one that the request excludes."""
        if self.exclusions is None:
            return tokens
        previous = list(self._previous)
        for i, token in enumerate(tokens):
            if self.exclusions.excludes(token, previous):
                return tokens[:i]
            previous.append(token)
        return tokens

    # --- which tokens may come next ---------------------------------------------------------

    def compute_mask(self) -> np.ndarray:
        """Returns a new mask [W] uint32 of the tokens that may come next, stop tokens included."""
        mask = self._mask_but_stops()
        if self.min_tokens > 0:
            others = self._without_stops(mask)
            if others.any():
                return others
        if self._is_accepting():
            add_tokens_(mask, self.stops)
        return mask

    def _mask_but_stops(self) -> np.ndarray:
        """Returns a new mask [W] uint32 of the tokens that may come next, without the stop tokens
        that are legal only because the grammar is complete."""
        if self.reasoning is not None:
            return self._reasoning_mask()
        mask = self._grammar_mask()
        begins = () if self._optional_reasoning is None else self._optional_reasoning.begins
        add_tokens_(mask, (token for token in begins if self._before_first_excluded([token])))
        return mask

    def closing_tokens(self) -> np.ndarray:
        """Returns [V] bool: the legal tokens that may help to close an answer. Stop tokens, and
        tokens that begin reasoning or an optional call, are not among them."""
        mask = self._grammar_mask() if self.reasoning is None else self._reasoning_mask()
        is_legal = unpack_mask(self._without_stops(mask), self.vocabulary.size)
        call_begin = self.vocabulary.call_begin
        if call_begin is not None and is_legal[call_begin] and self._is_optional(call_begin):
            is_legal[call_begin] = False
        return is_legal

    def _grammar_mask(self) -> np.ndarray:
        """Returns a new mask [W] uint32 of what the grammar allows, but for excluded tokens."""
        mask = np.zeros(self.vocabulary.mask_length, dtype=np.uint32)
        address = mask.__array_interface__["data"][0]  # a tenth of the time of `mask.ctypes`
        self._matcher.unsafe_compute_mask_ptr(address, mask.nbytes)
        if self.exclusions is not None:
            self.exclusions.remove_from_(mask, self._previous)
            if not mask.any():
                # llguidance's mask has only the tokenizer's own spelling of a forced text. If the
                # request excludes that, any other spelling will do.
                text = self._matcher.compute_ff_bytes()
                for end in range(1, min(len(text), self.vocabulary.longest_token_bytes) + 1):
                    token = self.vocabulary.token_by_bytes.get(text[:end])
                    if token is not None and self._before_first_excluded([token]):
                        add_tokens_(mask, [token])
        return mask

    def _reasoning_mask(self) -> np.ndarray:
        """Returns a new mask [W] uint32 of what may come next inside of reasoning."""
        mask = self._without_stops(self.vocabulary.full_mask)
        if self.exclusions is not None:
            self.exclusions.remove_from_(mask, self._previous)
        assert self.reasoning is not None
        marks = self.reasoning.opening | self.reasoning.begins
        remove_tokens_(mask, (token for token in marks if not self.allows_token(token)))
        return mask

    def _without_stops(self, mask: np.ndarray) -> np.ndarray:
        """Returns a copy of the mask [W] uint32 without stop tokens."""
        mask = mask.copy()
        remove_tokens_(mask, {*self.stops, self.vocabulary.tokenizer.eos_token})
        return mask

    def forced_tokens(self) -> list[int]:
        """Returns the tokens that have to come next, up to the first that would end the answer or
        is excluded. Returns none where the tokenizer could spell the forced text in several ways,
        and none inside of reasoning."""
        if self.has_ended or self.reasoning is not None or self._optional_reasoning is not None:
            return []
        tokens = self._before_first_excluded(self._matcher.compute_ff_tokens())
        stop = next((i for i, token in enumerate(tokens) if token in self.stops), None)
        return tokens[:stop]

    def reasoning_ends(self) -> list[int]:
        """Returns the tokens that may end the reasoning here; none outside of reasoning. Tokens
        that are also a part of the answer, such as the beginning of a call, come last: after them
        the answer has less choice."""
        if self.reasoning is None:
            return []
        opening = self.reasoning.opening
        ends = sorted(self.reasoning.ends, key=lambda end: (end in opening, end))
        return [end for end in ends if self.allows_token(end)]
