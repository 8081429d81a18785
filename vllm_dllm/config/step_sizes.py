"""Sizes of a GPU's steps: room for canvases, CUDA graphs, and widths of narrowed canvases."""

from typing import Any

PROMPT_DIVISOR = 4  # a quarter of a step's tokens is left to prompts
CAPTURED_CANVASES = 16
"""Canvases of the largest CUDA graph. A larger step computes for longer than the host takes to
launch it (an estimate: 2 TFLOP a canvas of the 26B model, 60 ms on an H100)."""
WIDTH_STEP = 16  # tokens; narrowed canvases are multiples of this, so there are few widths
_FINE_CANVASES = 4  # up to this many, steps are captured in quarters of a canvas
_EACH_CANVAS = 8  # up to this many, each number of canvases has a graph; beyond, every other


def max_canvases_per_step(token_budget: int, canvas_length: int) -> int:
    """Returns how many canvases of `canvas_length` tokens fit into a step of `token_budget` tokens
    beside the quarter that is left to prompts; at least 1."""
    return max(1, (token_budget - token_budget // PROMPT_DIVISOR) // canvas_length)


def capture_sizes(canvas_length: int, max_num_seqs: int, token_budget: int) -> list[int]:
    """Returns the sizes, in tokens, of the steps to capture as CUDA graphs, ascending.

    A step of full canvases replays the graph of that many canvases, or of one more. Sizes in
    between, in quarters of a canvas, are for steps with a prompt or a narrower canvas. They are
    padded by at most a quarter of a canvas. `token_budget`: most tokens of a step.
    """
    most = max(1, min(max_num_seqs, CAPTURED_CANVASES, token_budget // canvas_length))
    whole = {n for n in range(1, most + 1) if n <= _EACH_CANVAS or n % 2 == 0} | {most}
    quarter = -(-canvas_length // 4)
    # Even a single request's step may hold a prompt beside its canvas.
    fine = range(quarter, min(max(most, 2), _FINE_CANVASES) * canvas_length, quarter)
    sizes = {n * canvas_length for n in whole} | set(fine)
    return sorted(size for size in sizes if size <= token_budget)


def narrowed_width(num_tokens: Any) -> Any:
    """Returns `num_tokens`, a number or a tensor, rounded up to a multiple of WIDTH_STEP."""
    return (num_tokens + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP
