"""`--reasoning-parser gemma4`: what Gemma 4 thinks and what it answers, the same streamed or not.

vLLM's own differs between the two, and shows markers, where stop strings are looked for or an
answer is cut. This one replaces it under its name.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning.gemma4_engine_reasoning_parser import Gemma4ParserReasoningAdapter

from vllm_dllm.compat.parsers import begins_in_reasoning
from vllm_dllm.grammar.gemma_reading import MARKERS, cut_marker, overlap

BEGIN, END = "<|channel>", "<channel|>"
_HEAD = "thought\n"  # of what is thought; says nothing


class GemmaReasoningParser(Gemma4ParserReasoningAdapter):
    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        missing = [name for name in (BEGIN, END) if name not in self.vocab]
        if missing:
            raise RuntimeError(
                f"gemma4 needs a tokenizer with the tokens {BEGIN} and {END}, got one without "
                f"{' and '.join(missing)}. Leave --reasoning-parser out: this model does not reason"
            )
        self._reader = self._start(begins_open=False)
        self._tokens: Counter[int | None] = Counter()

    def _start(self, *, begins_open: bool) -> "ReasoningReader":
        markers = {BEGIN, END, *MARKERS, *self.model_tokenizer.all_special_tokens}
        return ReasoningReader(markers, begins_open=begins_open)

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        super().adjust_initial_state_from_prompt(prompt_token_ids)
        self._reader = self._start(begins_open=begins_in_reasoning(self))

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        begins_open = END in model_output and BEGIN not in model_output.partition(END)[0]
        reader = self._start(begins_open=begins_open)
        reasoning, content = reader.read(model_output)
        stops = getattr(request, "stop", None) or []
        stops = [stops] if isinstance(stops, str) else stops
        last = reader.finish(is_cut=cut_marker(reader.rest, reader.markers, stops))
        return reasoning + last[0] or None, content + last[1] or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        self._tokens.update(delta_token_ids)
        return _delta(*self._reader.read(delta_text))

    def has_engine_confirmed_reasoning_end(self) -> bool:
        return self._reader.has_ended

    def finish_streaming(self) -> DeltaMessage | None:
        """vLLM asks for it behind the last text. Only a stop string cuts a token's text."""
        reader = self._reader
        begun = [marker for marker in reader.markers if marker.startswith(reader.rest)]
        is_cut = any(self._tokens[self.vocab.get(one)] > reader.seen[one] for one in begun)
        return _delta(*reader.finish(is_cut=is_cut))


class ReasoningReader:
    """Reads one answer, in as many pieces as it comes in. From the first marker of calls on, all is
    content, which others read."""

    def __init__(self, markers: Collection[str], *, begins_open: bool) -> None:
        self.markers = markers
        self._marker = re.compile("|".join(map(re.escape, markers)))
        self._thinks = begins_open
        self._head = ""  # that has come of `_HEAD`, as long as it may be one
        self._knows_head = False
        self.rest = ""  # which only what follows tells what it is
        self._blank = ""  # whitespace that is no content before a call
        self.has_ended = False
        self.seen: Counter[str] = Counter()  # markers

    def read(self, text: str) -> tuple[str, str]:
        """What the next piece says: what is thought, and content."""
        reasoning = content = ""
        text, at = self.rest + text, 0
        self.rest = ""

        def take(piece: str) -> None:
            nonlocal reasoning, content
            if self._thinks:
                reasoning += self._without_head(piece)
            else:
                content += piece

        while not self.has_ended and (marker := self._marker.search(text, at)):
            take(text[at : marker.start()])
            at = marker.end()
            self.seen[marker.group()] += 1
            if marker.group() == BEGIN:
                self._thinks = True
            elif marker.group() == END:
                self._thinks = False
            elif marker.group() in MARKERS:
                self.has_ended, self._thinks, at = True, False, marker.start()
        if not self.has_ended:
            held = max((overlap(text[at:], one) for one in self.markers), default=0)
            self.rest, text = text[len(text) - held :], text[: len(text) - held]
        take(text[at:])
        content, self._blank = self._blank + content, ""
        if not self.has_ended:
            self._blank = content[len(content.rstrip()) :]
        return reasoning, content[: len(content) - len(self._blank)]

    def finish(self, *, is_cut: bool) -> tuple[str, str]:
        """The rest. `is_cut`: it is the beginning of a marker."""
        rest, self.rest = "" if is_cut else self.rest, ""
        blank, self._blank = self._blank, ""
        return (self._without_head(rest), blank) if self._thinks else ("", blank + rest)

    def _without_head(self, piece: str) -> str:
        if self._knows_head:
            return piece
        self._head += piece
        if _HEAD.startswith(self._head) and self._head != _HEAD:
            return ""
        self._knows_head = True
        return self._head.removeprefix(_HEAD)


def _delta(reasoning: str, content: str) -> DeltaMessage | None:
    if not reasoning and not content:
        return None
    return DeltaMessage(reasoning=reasoning or None, content=content or None)
