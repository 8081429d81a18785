"""Tracks how far the answer of a request with a grammar has come, on the worker. Brings the most
probable tokens of its canvas to the host, where the grammar finds a legal path."""

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise.rules import Reveal
from vllm_dllm.grammar.masks import unpack_mask
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import MORE_TOKENS, CanvasRows
from vllm_dllm.step.logits.canvas_logits import CanvasLogits

MOST_KEPT = 1024
"""How many answers are remembered after their requests left: preempted ones come back."""


class Mark(NamedTuple):
    """A position in an answer, with what of its state the tokens before it do not determine."""

    position: int  # absolute
    plan: list[int] | None  # tokens that an earlier step planned to complete the answer; None: none
    is_cut: bool  # whether the answer was closed early, because its tokens run out


@dataclass
class Answer:
    """How far the answer of one request with a grammar has come."""

    grammar: Future[GrammarState]
    position: int  # absolute, of the next token
    end: int  # absolute, after the last token that it may get
    wanted_stop: int | None  # the stop token of an answer that is cut, if nothing excludes it
    goes_on: bool  # whether the request wants tokens after the grammar's end
    is_cut: bool = False  # whether it was closed early, because its tokens run out
    next_forced: list[int] = field(default_factory=list)  # tokens that begin the next canvas
    canvas: Mark | None = None  # where the present canvas begins
    kept: tuple[Mark, Mark] | None = None  # `marks_to_keep` from before a preemption

    @property
    def state(self) -> GrammarState:
        """Returns the grammar's state at `position`. Waits until the grammar is compiled, and
        raises what its compilation raised."""
        return self.grammar.result()

    @property
    def stop_token(self) -> int:
        """Returns the token that ends the answer: `wanted_stop`, or else the tokenizer's EOS, if
        they are stop tokens of the grammar. Otherwise it is the grammar's smallest stop token."""
        stops, own = self.state.stops, self.state.vocabulary.tokenizer.eos_token
        for stop in (self.wanted_stop, own):
            if stop is not None and stop in stops:
                return stop
        return min(stops)

    @property
    def current_mark(self) -> Mark:
        """Returns the mark at `position`. Waits until the grammar is compiled."""
        return Mark(self.position, self.state.plan, self.is_cut)

    def marks_to_keep(self) -> tuple[Mark, Mark] | None:
        """Returns the marks of the current canvas' first position and of `position`, from which the
        answer goes on after a preemption; None if no canvas has begun or the grammar has ended."""
        if self.canvas is None or self.state.has_ended:
            return None
        return self.canvas, self.current_mark

    def begin_canvas(self, begin: int, emitted: list[int]) -> int | None:
        """Consumes the tokens `emitted` since the previous canvas, and moves to the canvas that
        begins at absolute position `begin`. Restores the kept marks of a request that was
        preempted. Returns the first illegal token, at which it ends; None if all are legal."""
        if self.kept is not None:
            canvas, latest = self.kept
            # A canvas that was not finished starts anew.
            known = canvas if begin == canvas.position else latest
            before = max(0, known.position - self.position)
            rejected = self._consume(emitted[:before])
            if rejected is not None:
                return rejected
            self.state.plan, self.is_cut = known.plan, known.is_cut
            self.kept, emitted = None, emitted[before:]
        rejected = self._consume(emitted)
        self.position = max(self.position, begin)
        if self.canvas is None or self.canvas.position != begin:
            self.canvas = self.current_mark
        return rejected

    def _consume(self, tokens: list[int]) -> int | None:
        """Moves the grammar's state on by `tokens`, up to the grammar's end. Returns the first
        illegal token, at which it stops; None if all are legal."""
        for token in tokens:
            if self.state.has_ended:
                break
            if not self.state.consume_token(token):
                return token
            self.position += 1
        return None


class KeptMarks:
    """Keeps the marks of the last `MOST_KEPT` requests that left, by request id. A preempted
    request then continues its answer as if it had stayed."""

    def __init__(self) -> None:
        self._marks: OrderedDict[str, tuple[Mark, Mark]] = OrderedDict()

    def save(self, req_id: str, answer: Answer) -> None:
        """Keeps the marks of a request that leaves the worker. Does nothing if it has no marks or
        its grammar is not compiled."""
        marks, grammar = answer.kept, answer.grammar
        if marks is None and grammar.done() and grammar.exception() is None:
            marks = answer.marks_to_keep()
        if marks is not None:
            self._marks[req_id] = marks
            if len(self._marks) > MOST_KEPT:
                self._marks.popitem(last=False)

    def pop(self, req_id: str) -> tuple[Mark, Mark] | None:
        """Removes and returns the marks of a request that comes back; None if none are kept."""
        return self._marks.pop(req_id, None)


MOST_PROBABLE = 32
"""Tokens of each row that go to the host. A row in which none of them is legal is read again."""
_REVEALED_NATS = 20.0
"""How much the log-probability of other tokens is lowered in the row of a revealed one."""


def read_canvas_rows(
    logits: CanvasLogits,
    i: int,
    temperature: torch.Tensor,  # [L, 1] fp32, of canvas i
    revealing: Reveal | None,  # None: no canvas reveals tokens permanently
) -> CanvasRows:
    """Returns the `MOST_PROBABLE` most probable tokens of each row of canvas i on the host, and
    functions that read more. Permanently revealed tokens come first. Waits for the device."""
    parts, first = [], 0
    for rows in logits.processed(i):
        parts.append(_top_tokens(rows / temperature[first : first + len(rows)], MOST_PROBABLE))
        first += len(rows)
    tokens, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    if revealing is not None:
        tokens, logprobs = _put_revealed_first(tokens, logprobs, revealing, i)
    reader = _RowReader(logits, i, temperature)
    return CanvasRows(
        tokens.cpu().numpy(),
        logprobs.cpu().numpy(),
        best_legal=reader.best_legal,
        more=reader.more_top_tokens,
    )


def _top_tokens(
    scaled: torch.Tensor,  # [..., V] fp32
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k most probable tokens [..., k] int64 of each row, the best first, and their
    log-probabilities [..., k] fp32."""
    top = scaled.topk(min(k, scaled.shape[-1]), dim=-1)
    return top.indices, top.values - scaled.logsumexp(dim=-1, keepdim=True)


class _RowReader(NamedTuple):
    """Reads more of single rows of canvas i. Waits for the device."""

    logits: CanvasLogits
    i: int
    temperature: torch.Tensor  # [L, 1] fp32

    def best_legal(
        self,
        row: int,
        words: np.ndarray,  # [W] uint32, a bit for each token
    ) -> tuple[int, float]:
        """Returns the row's most probable token of `words`, and its log-probability among all."""
        scaled = self._scaled(row)
        is_illegal = async_tensor_h2d(~unpack_mask(words, len(scaled)), device=scaled.device)
        token = scaled.masked_fill(is_illegal, float("-inf")).argmax()
        logprob = scaled[token] - scaled.logsumexp(dim=-1)
        chosen, of_chosen = torch.stack((token.double(), logprob.double())).tolist()
        return int(chosen), of_chosen

    def more_top_tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row's `MORE_TOKENS` most probable tokens [k] int64, the best first, and their
        log-probabilities [k] fp32."""
        tokens, logprobs = _top_tokens(self._scaled(row), MORE_TOKENS)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _scaled(self, row: int) -> torch.Tensor:
        return self.logits.row(self.i, row) / self.temperature[row]


def _put_revealed_first(
    tokens: torch.Tensor,  # [L, k] int64
    logprobs: torch.Tensor,  # [L, k] fp32
    revealing: Reveal,
    i: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `tokens` and `logprobs` with each permanently revealed token first in its row, at
    log-probability 0. In such a row the last token drops out, the other log-probabilities fall by
    `_REVEALED_NATS`, and the revealed token may occur a second time."""
    L = len(tokens)
    is_revealed = (revealing.revealed[i, :L] & revealing.is_chosen[i])[:, None]
    shown = revealing.tokens[i, :L, None]
    certain = torch.zeros_like(logprobs[:, :1])
    others = logprobs[:, :-1] - _REVEALED_NATS
    return (
        torch.where(is_revealed, torch.cat((shown, tokens[:, :-1]), dim=1), tokens),
        torch.where(is_revealed, torch.cat((certain, others), dim=1), logprobs),
    )
