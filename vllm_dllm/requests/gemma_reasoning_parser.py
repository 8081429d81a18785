"""`--reasoning-parser gemma4`: splits an answer of Gemma 4 into reasoning and content.

It replaces vLLM's parser of this name, which gives other results for streams than for whole answers
and shows markers where a stop string or `max_tokens` cuts the answer.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning.gemma4_engine_reasoning_parser import Gemma4ParserReasoningAdapter

from vllm_dllm.compat.parsers import begins_in_reasoning
from vllm_dllm.grammar.gemma_calls import CALL
from vllm_dllm.requests.gemma_reader import (
    MARKERS,
    find_markers,
    is_cut_marker,
    overlap_length,
    stop_strings,
)

BEGIN, END = "<|channel>", "<channel|>"
_HEAD = "thought\n"  # before the reasoning; not shown


class GemmaReasoningParser(Gemma4ParserReasoningAdapter):
    """Implements vLLM's interface of reasoning parsers for Gemma 4. Raises RuntimeError if the
    tokenizer lacks a token that begins or ends reasoning."""

    reads_prompts = True  # see `compat.parsers.show_prompts_to_parsers`

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """Makes the parser of an answer whose prompt has not begun the reasoning. The further
        arguments are vLLM's."""
        super().__init__(tokenizer, *args, **kwargs)
        missing = [name for name in (BEGIN, END) if name not in self.vocab]
        if missing:
            raise RuntimeError(
                f"gemma4 needs a tokenizer with the tokens {BEGIN} and {END}, got one without "
                f"{' and '.join(missing)}. Leave --reasoning-parser out: this model does not reason"
            )
        self._begins_open = False  # whether the prompt has begun the reasoning
        self._reader = self._make_reader()  # of the stream
        self._tokens: Counter[int | None] = Counter()  # token -> how often it came in the stream

    def _make_reader(self) -> "ReasoningReader":
        """Returns a reader of one answer."""
        markers = find_markers(self.model_tokenizer)
        return ReasoningReader(markers, begins_open=self._begins_open)

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Starts inside of reasoning if the prompt has begun the reasoning."""
        super().adjust_initial_state_from_prompt(prompt_token_ids)
        self._begins_open = begins_in_reasoning(self)
        self._reader = self._make_reader()

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Returns the reasoning and the content of a whole answer; None for an empty one."""
        reader = self._make_reader()
        begun = reader.read_piece(model_output)
        is_cut = is_cut_marker(reader.rest, reader.markers, stop_strings(request))
        rest = reader.finish(is_cut=is_cut)
        return begun.reasoning + rest.reasoning or None, begun.content + rest.content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Returns the reasoning and the content that the next piece of the stream adds; None if it
        adds nothing. Uses only the piece, `delta_text` and `delta_token_ids`."""
        self._tokens.update(delta_token_ids)
        return _delta_message(self._reader.read_piece(delta_text))

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Returns whether a tool call has come, after which nothing is reasoning. vLLM's hook."""
        return self._reader.has_ended

    def finish_streaming(self) -> DeltaMessage | None:
        """Returns what is left when the stream has ended; None if nothing is. A rest is a cut
        marker, and not shown, if the marker's token has come more often than its text: only a stop
        string cuts the text of a token."""
        reader = self._reader
        begun = [marker for marker in reader.markers if marker.startswith(reader.rest)]
        is_cut = any(self._tokens[self.vocab.get(one)] > reader.seen[one] for one in begun)
        return _delta_message(reader.finish(is_cut=is_cut))


class Texts(NamedTuple):
    """The reasoning and the content of a piece of an answer."""

    reasoning: str
    content: str


class ReasoningReader:
    """Reads one answer, piece by piece. From the first marker of a tool call on, all text is
    content. That includes the markers, which the tool parser reads. In reasoning, only the marker
    that begins a call does this: a grammar takes what follows any other for reasoning, too."""

    def __init__(self, markers: Collection[str], *, begins_open: bool) -> None:
        """Starts outside of reasoning, or with `begins_open` inside. `markers` are not shown."""
        self.markers = markers
        self._marker = re.compile("|".join(map(re.escape, markers)))
        self._thinks = begins_open
        self._head = ""  # the beginning of the reasoning, as long as it may be `_HEAD`
        self._knows_head = False
        self.rest = ""  # text that may be the beginning of a marker
        self._spaces = ""  # whitespace at the end of the content, until it is known what follows
        self.has_ended = False  # whether a tool call has come, after which nothing is reasoning
        self.seen: Counter[str] = Counter()  # marker -> how often its text has come

    def read_piece(self, text: str) -> Texts:
        """Reads the next piece. Returns the reasoning and the content that are certain by now and
        were not returned before."""
        text, at = self.rest + text, 0
        pieces: list[tuple[bool, str]] = []  # whether it is reasoning, and its text
        while not self.has_ended and (marker := self._marker.search(text, at)):
            pieces.append((self._thinks, text[at : marker.start()]))
            at = marker.end()
            self.seen[marker.group()] += 1
            if marker.group() == BEGIN:
                self._thinks = True
            elif marker.group() == END:
                self._thinks = False
            elif marker.group() == CALL or (marker.group() in MARKERS and not self._thinks):
                self.has_ended, self._thinks, at = True, False, marker.start()
        end = len(text)
        if not self.has_ended:
            end -= max((overlap_length(text[at:], one) for one in self.markers), default=0)
        pieces.append((self._thinks, text[at:end]))
        self.rest = text[end:]
        reasoning = "".join(self._strip_head(piece) for thinks, piece in pieces if thinks)
        content = self._spaces + "".join(piece for thinks, piece in pieces if not thinks)
        self._spaces = "" if self.has_ended else content[len(content.rstrip()) :]
        return Texts(reasoning, content[: len(content) - len(self._spaces)])

    def finish(self, *, is_cut: bool) -> Texts:
        """Ends the answer, and returns the rest of it. With `is_cut` the text in `rest` is the
        beginning of a marker, and is not shown."""
        rest, self.rest = "" if is_cut else self.rest, ""
        spaces, self._spaces = self._spaces, ""
        if self._thinks:
            return Texts(self._strip_head(rest), spaces)
        return Texts("", spaces + rest)

    def _strip_head(self, piece: str) -> str:
        """Returns a piece of the reasoning without `_HEAD`, which may come in several pieces. Text
        that may still be a part of `_HEAD` is kept for the next call."""
        if self._knows_head:
            return piece
        self._head += piece
        if _HEAD.startswith(self._head) and self._head != _HEAD:
            return ""
        self._knows_head = True
        return self._head.removeprefix(_HEAD)


def _delta_message(texts: Texts) -> DeltaMessage | None:
    """Returns the message of a stream for texts; None if both are empty."""
    if not any(texts):
        return None
    return DeltaMessage(reasoning=texts.reasoning or None, content=texts.content or None)
