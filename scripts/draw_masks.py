"""Draws docs/masks.png: which keys each row of a request sees, from `attention_kernels.masks`.

python scripts/draw_masks.py
"""

from pathlib import Path

import matplotlib
import torch

from attention_kernels.masks import visible

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

CONTEXT, ROWS, WINDOW_LEFT = 12, 8, 5
PANELS = [
    ("causal", True, False),
    ("bidirectional, reference rule", False, False),
    ("bidirectional, symmetric rule", False, True),
]
NOT_SEEN, IN_CONTEXT, IN_ROWS = "#eeeeee", "#4c78a8", "#f58518"


def draw(path: Path) -> None:
    """Writes the figure to `path`."""
    length = CONTEXT + ROWS
    query_pos, key_pos = torch.arange(CONTEXT, length)[:, None], torch.arange(length)
    figure, axes = plt.subplots(len(PANELS), figsize=(7, 8), layout="constrained")
    for axis, (title, causal, symmetric) in zip(axes, PANELS, strict=True):
        seen = visible(query_pos, key_pos, CONTEXT, causal, WINDOW_LEFT, symmetric)
        for row, column in torch.cartesian_prod(torch.arange(ROWS), key_pos).tolist():
            color = IN_CONTEXT if column < CONTEXT else IN_ROWS
            color = color if seen[row, column] else NOT_SEEN
            axis.add_patch(Rectangle((column + 0.07, row + 0.07), 0.86, 0.86, color=color))
        axis.axvline(CONTEXT, color="black", linewidth=1)
        axis.set(xlim=(0, length), ylim=(ROWS, 0), aspect="equal", ylabel="row at")
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xticks(key_pos[::2] + 0.5, key_pos[::2].tolist())
        axis.set_yticks(torch.arange(ROWS) + 0.5, query_pos[:, 0].tolist())
        axis.tick_params(length=0, labelsize=8)
        axis.spines[:].set_visible(False)
    axes[-1].set_xlabel(
        f"key at: {CONTEXT} tokens of context, then the request's own rows; "
        f"window_left = {WINDOW_LEFT}"
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).parents[1] / "docs" / "masks.png")
