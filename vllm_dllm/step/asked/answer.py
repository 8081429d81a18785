"""Tracks how far the answer of a request with a grammar has come, on the worker."""

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_dllm.grammar.state import GrammarState

MOST_KEPT = 1024
"""How many answers are remembered after their requests left: preempted ones come back."""


class Mark(NamedTuple):
    """A position in an answer, with the parts of its state that the tokens before it do not
    determine."""

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
        answer continues after a preemption. Returns None if no canvas has begun or the grammar has
        ended."""
        if self.canvas is None or self.state.has_ended:
            return None
        return self.canvas, self.current_mark

    def begin_canvas(self, begin: int, emitted: list[int]) -> int | None:
        """Consumes the tokens `emitted` since the previous canvas, and moves to the canvas that
        begins at absolute position `begin`. Restores the kept marks of a request that was
        preempted. Returns the first illegal token, which ends the consumption; None if all are
        legal."""
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
        """Removes and returns the marks of a request that comes back. Returns None if none are
        kept."""
        return self._marks.pop(req_id, None)
