"""How many canvases a step of a GPU is made for, and which steps become CUDA graphs."""

PROMPT_SHARE = 4  # one token in so many of a step is left to prompts
CAPTURED_CANVASES = 16
"""Of the largest graph. A larger step computes for longer than the host takes to launch it (an
estimate: 2 TFLOP a canvas of the 26B model, 60 ms on an H100)."""
_FINE_CANVASES = 4  # steps up to so many are captured in quarters of a canvas
_EACH_CANVAS = 8  # up to so many, each number of canvases has a graph; beyond, every other


def canvases_at_once(
    token_budget: int,  # of a step
    canvas_length: int,
) -> int:
    """Requests that are denoised in every step while prompts keep their share of it."""
    return max(1, (token_budget - token_budget // PROMPT_SHARE) // canvas_length)


def capture_sizes(canvas_length: int, max_num_seqs: int, token_budget: int) -> list[int]:
    """Tokens of the steps to capture, ascending.

    A step of full canvases replays the graph of their number, or of one more. Quarters in between
    are for steps with a prompt or a narrower canvas: these are padded by at most that much.
    """
    most = max(1, min(max_num_seqs, CAPTURED_CANVASES, token_budget // canvas_length))
    whole = {n for n in range(1, most + 1) if n <= _EACH_CANVAS or n % 2 == 0} | {most}
    quarter = -(-canvas_length // 4)
    # Even a single request's step may hold a prompt beside its canvas.
    fine = range(quarter, min(max(most, 2), _FINE_CANVASES) * canvas_length, quarter)
    sizes = {n * canvas_length for n in whole} | set(fine)
    return sorted(size for size in sizes if size <= token_budget)
