"""A canvas under a grammar in one step: which legal tokens take the place of its best guesses."""

from dataclasses import dataclass

from vllm_dllm.grammar.best_first_search import beam_search, best_first_search
from vllm_dllm.grammar.cutting import cut_to_fit
from vllm_dllm.grammar.rows import CanvasRows, LegalPath
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import StuckError, trace_path, walk_best_guesses

MAX_WALK_COST_NATS = 2.0
"""The walk's repairs of confident rows may cost this much before a search is tried. Where the model
is sure of nothing yet, a better path is worth little: the next step changes it."""
_ROWS_BEFORE_REPAIR = 24
"""Rows before the first repair that a search may change: the wrong token may be among them."""


@dataclass(frozen=True)
class ConstrainedCanvas:
    """The legal tokens of one canvas, and what they mean for the next one."""

    path: LegalPath  # shorter than the canvas if the answer ends: the rows after it are free
    next_forced: list[int]  # tokens that the next canvas has to begin with
    ended: bool  # the path ends the answer
    is_cut: bool  # the answer was cut and closed, because not all of it fits into its tokens


def constrain_canvas(
    start: GrammarState,  # at the canvas' first row; only its plan and found completions change
    rows: CanvasRows,
    num_tokens: int,  # that the answer may still get, those of this canvas included
    stop: int | None,  # stop token to append to an answer that is cut; None: append nothing
) -> ConstrainedCanvas:
    """Returns a legal path through the canvas, cut where the answer would not fit into
    `num_tokens`. If no completion that fits is found, or the model is inside of a call that it
    chose to make, the path stays uncut.

    Raises:
        StuckError: no token is legal and no completion is known, or the matcher has given up.
    """
    num_rows = min(len(rows), num_tokens)
    path, end = find_cheap_path(start, rows, num_rows)
    tokens = cut_to_fit(start, path, end, num_tokens)
    if tokens is None and path.is_stuck:
        raise StuckError("no token is legal")
    if tokens is not None:
        if stop is not None:
            tokens = [*tokens, stop]
        end = start.copy()
        path = trace_path(end, rows, tokens[:num_rows])
    return ConstrainedCanvas(path, end.forced_tokens(), end.has_ended, is_cut=tokens is not None)


def find_cheap_path(
    start: GrammarState, rows: CanvasRows, num_rows: int
) -> tuple[LegalPath, GrammarState]:
    """Returns a legal path through at most the first `num_rows` rows, and the grammar's state after
    it. Does not move `start`.

    The path is the walk along the best guesses. If the walk is stuck, or its repairs cost more than
    `MAX_WALK_COST_NATS`, a search may replace it by a cheaper path.

    Raises:
        StuckError: the matcher has given up.
    """
    end = start.copy()
    path = walk_best_guesses(end, rows, num_rows)
    if path.confident_cost_nats <= MAX_WALK_COST_NATS and not path.is_stuck:
        return path, end
    first_repair = len(path.tokens) if path.first_repair is None else path.first_repair
    num_kept = max(path.num_reasoning, first_repair - _ROWS_BEFORE_REPAIR)
    prefix = path.tokens[:num_kept]
    found = best_first_search(start, rows, num_rows, prefix)
    found = found or beam_search(start, rows, num_rows, prefix)
    if found is None or (found.cost_nats >= path.cost_nats and not path.is_stuck):
        return path, end
    end = start.copy()
    return trace_path(end, rows, found.tokens), end
