"""A canvas under a grammar in one step: which legal tokens take the place of its best guesses."""

from dataclasses import dataclass

from vllm_dllm.grammar.beam_search import beam_search
from vllm_dllm.grammar.best_first_search import best_first_search
from vllm_dllm.grammar.cutting import cut_to_fit
from vllm_dllm.grammar.rows import CanvasRows, LegalPath
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import StuckError, trace_path, walk_best_guesses

MAX_WALK_COST_NATS = 2.0
"""A search follows a walk whose repairs of confident rows cost more. Where the model is sure of
nothing yet, a better path is worth little, and the next step changes it."""
_ROWS_BEFORE_REPAIR = 24
"""How far before the first repair the wrong token may be."""


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
    num_tokens: int,  # that the answer may still get, from the canvas' first on
    stop: int | None,  # appended to an answer that is cut; None: nothing is
) -> ConstrainedCanvas:
    """Returns a legal path through the canvas, from which the answer can be completed within
    `num_tokens`.

    Raises:
        StuckError: there is none.
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
    it. The path is the walk along the best guesses; where its repairs cost more than
    `MAX_WALK_COST_NATS`, or it is stuck, it is a cheaper one if a search finds one. Does not move
    `start`.

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
