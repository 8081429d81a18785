"""Draws a canvas: a frame for a terminal, a line for a pipe."""

import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Group
from rich.panel import Panel
from rich.text import Text
from tokenizers import Tokenizer

from vllm_dllm.tools.demo.steps import Step

ACCEPTED, OPEN, FINISHED = "bold green", "dim", "bold"
END = "·"  # a special token: past the end of the answer there is little else
UNREADABLE = "▒"  # part of a character, or a control character
HIDDEN = "░"  # a position that is not accepted, where text cannot be dim
BAR_CELLS = 20
WIDEST_FRAME = 100  # cells


class TokenTexts:
    """What a token looks like in its cell: short, printable, on one line."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._texts: dict[int, str] = {}
        self.max_entropy_nats = math.log(tokenizer.get_vocab_size())

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> "TokenTexts":
        return cls(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._text(token_id)
        return self._texts[token_id]

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _text(self, token_id: int) -> str:
        if token_id in self._special:
            return END
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        text = text.replace("\n", "⏎").replace("\t", " ")
        text = "".join(UNREADABLE if _is_unreadable(char) else char for char in text)
        return text if cell_len(text) > 0 else UNREADABLE


def _is_unreadable(char: str) -> bool:
    # Marks, controls, surrogates and unassigned characters have no cell of their own.
    return char == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(char)[0] in "MC"


def cells(step: Step, texts: TokenTexts) -> list[tuple[str, str]]:
    """(text, style) of every canvas position: the best guess, and whether it is accepted."""
    if step.finished:
        return [(texts[token], FINISHED) for token in step.best_guess]
    return [
        (texts[token], ACCEPTED if accepted else OPEN)
        for token, accepted in zip(step.best_guess, step.accepted, strict=True)
    ]


def flow(drawn: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """The cells in lines of at most `width`, broken between cells only."""
    lines, used = [Text(no_wrap=True)], 0
    for text, style in drawn:
        size = cell_len(text)
        if used + size > width and used > 0:
            lines.append(Text(no_wrap=True))
            used = 0
        lines[-1].append(text, style)
        used += size
    return lines


def entropy_bar(entropy_nats: float, max_entropy_nats: float) -> str:
    """Full for a uniform guess, empty for certainty. The root of the share is drawn: most steps
    happen below a tenth of the maximum."""
    share = math.sqrt(min(max(entropy_nats / max_entropy_nats, 0.0), 1.0))
    filled = math.ceil(share * BAR_CELLS)
    return "█" * filled + "░" * (BAR_CELLS - filled)


def frame(step: Step, finished: Sequence[list[int]], texts: TokenTexts, width: int) -> Group:
    """What a terminal shows of one step: the blocks before it, counters, and the canvas."""
    width = min(width, WIDEST_FRAME)
    status = Text(no_wrap=True, overflow="ellipsis")
    status.append(f"canvas {step.block + 1}  step {step.number:2d}  ")
    status.append(f"accepted {sum(step.accepted):3d}/{len(step.accepted)}  ")
    status.append(f"entropy {step.entropy_nats:6.3f} ")
    status.append(entropy_bar(step.entropy_nats, texts.max_entropy_nats), "cyan")
    status.append("  finished" if step.finished else "", FINISHED)
    before = [Text(texts.decode(block), FINISHED) for block in finished]
    inside = max(width - 4, 1)  # the panel's border and padding
    canvas = Panel(Group(*flow(cells(step, texts), inside)), width=width)
    return Group(*before, status, canvas)


def line(step: Step, texts: TokenTexts) -> str:
    """One step as one line of plain text; a position that is not accepted is shown as a mark."""
    drawn = [HIDDEN if style == OPEN else text for text, style in cells(step, texts)]
    return (
        f"canvas {step.block + 1}  step {step.number:2d}  "
        f"accepted {sum(step.accepted):3d}/{len(drawn)}  "
        f"entropy {step.entropy_nats:6.3f}  {''.join(drawn).rstrip(END)}"
    )
