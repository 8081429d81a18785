"""A canvas in one step: which tokens it stands for, and what is legal in each of its rows."""

from dataclasses import dataclass

from vllm_dllm.grammar.beam import search
from vllm_dllm.grammar.closing import cut_to_fit
from vllm_dllm.grammar.rows import CanvasRows, Path
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import StuckError, masks_along


@dataclass(frozen=True)
class Constrained:
    """What a grammar makes of one canvas."""

    path: Path  # fewer tokens than rows if the answer ends: the rows behind are free
    next_forced: list[int]  # how the block behind it has to begin
    ended: bool
    is_cut: bool  # and closed: the model wanted more than its tokens hold


def constrain(
    start: GrammarState,  # at the canvas' first row; not moved, but given a plan
    rows: CanvasRows,
    num_tokens: int,  # that the answer may still get, this canvas' among them
    stop: int | None,  # the token that ends an answer which was cut; None: none does
) -> Constrained:
    """A legal path through the canvas, from which the answer can be completed within
    `num_tokens`.

    Raises:
        StuckError: there is none.
    """
    num_rows = min(len(rows), num_tokens)
    path, end = search(start, rows, num_rows)
    tokens = cut_to_fit(start, path, end, num_tokens)
    if tokens is None and path.is_stuck:
        raise StuckError("no token is legal")
    if tokens is not None:
        if stop is not None:
            tokens = [*tokens, stop]
        end = start.copy()
        path = masks_along(end, rows, tokens[:num_rows])
    return Constrained(path, end.forced_tokens(), end.has_ended, is_cut=tokens is not None)
