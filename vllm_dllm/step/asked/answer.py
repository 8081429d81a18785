"""How far the answer to a request with a grammar has come, on the worker."""

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_dllm.grammar.state import GrammarState

MOST_KEPT = 1024
"""Answers that are remembered after their requests left, since some are preempted and come back."""


class Mark(NamedTuple):
    """A place in an answer, and what the tokens before it do not tell."""

    position: int  # absolute
    plan: list[int] | None  # tokens that complete the answer from here, as a step before found
    is_cut: bool


@dataclass
class Answer:
    """One request's."""

    grammar: Future[GrammarState]
    position: int  # absolute, of the next token
    end: int  # absolute, behind the last token that it may get
    wanted_stop: int | None  # ends an answer that is cut, if nothing excludes it
    goes_on: bool  # behind its end, with what the model likes
    is_cut: bool = False  # and closed, as its tokens do not hold what the model wants to say
    next_forced: list[int] = field(default_factory=list)  # of the canvas behind the present one
    canvas: Mark | None = None  # where the present one begins
    kept: tuple[Mark, Mark] | None = None  # `marks` of the time before a preemption

    @property
    def state(self) -> GrammarState:
        return self.grammar.result()

    @property
    def stop(self) -> int:
        stops, own = self.state.stops, self.state.vocabulary.tokenizer.eos_token
        for stop in (self.wanted_stop, own):
            if stop is not None and stop in stops:
                return stop
        return min(stops)

    @property
    def here(self) -> Mark:
        return Mark(self.position, self.state.plan, self.is_cut)

    def marks(self) -> tuple[Mark, Mark] | None:
        """Where the canvas begins and where the answer is now; None: nothing is to be kept."""
        if self.canvas is None or self.state.has_ended:
            return None
        return self.canvas, self.here

    def begin_canvas(self, begin: int, emitted: list[int]) -> int | None:
        """Consumes what has been emitted since, up to `begin`. Returns a token that is illegal, if
        there is one."""
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
            self.canvas = self.here
        return rejected

    def _consume(self, tokens: list[int]) -> int | None:
        """Goes on by emitted tokens, to the end of the form. Returns the first illegal one."""
        for token in tokens:
            if self.state.has_ended:
                break
            if not self.state.consume_token(token):
                return token
            self.position += 1
        return None


class KeptMarks:
    """Keeps the marks of requests that left, by id: a preempted one's answer goes on as if it had
    stayed."""

    def __init__(self) -> None:
        self._marks: OrderedDict[str, tuple[Mark, Mark]] = OrderedDict()

    def keep(self, req_id: str, answer: Answer) -> None:
        """Keeps how far a preempted request has come."""
        marks, grammar = answer.kept, answer.grammar
        if marks is None and grammar.done() and grammar.exception() is None:
            marks = answer.marks()
        if marks is not None:
            self._marks[req_id] = marks
            if len(self._marks) > MOST_KEPT:
                self._marks.popitem(last=False)

    def take(self, req_id: str) -> tuple[Mark, Mark] | None:
        return self._marks.pop(req_id, None)
