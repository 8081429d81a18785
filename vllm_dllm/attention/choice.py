"""Chooses the version of attention that a layer runs in a step: the fastest, by measured times.

Times are data: `times/sm_90.json` has those of `bench.attention` on an H200, for all Hopper chips.
What a server measures on its own GPU (`measure.py`) is read the same way. A chip or a kind of layer
without times runs Triton.

A CUDA graph repeats the kernels of its capture, so a choice may depend on nothing that differs
between replays. It depends on the kind of layer, on the chip, on the longest context that the
server allows, and on the rows of a step: for a graph those of its capture, padding included. It
does not depend on how long contexts are at the moment: of two versions that are faster at different
contexts, the one is chosen that loses least where it loses most.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from vllm_dllm.measured.stopwatch import EQUAL

Version = Literal["triton", "fa4"]
VERSIONS: tuple[Version, ...] = get_args(Version)  # of equally fast ones the first runs
NAMES: dict[Version, str] = {"triton": "Triton", "fa4": "FlashAttention-4"}

_SHIPPED = Path(__file__).parent / "times"


class LayerKind(NamedTuple):
    """What decides how long attention takes in a layer, besides the step."""

    head_size: int
    num_heads: int  # query heads of this rank
    has_window: bool


@dataclass(frozen=True)
class Choice:
    """Says which version runs in a step, by the step's rows."""

    steps: tuple[tuple[int, Version], ...]  # (least rows, version); rising, the first from 0 rows

    def version_for(self, rows: int) -> Version:
        """Returns the version that a step of `rows` rows runs."""
        return self.steps[bisect_right(self.steps, rows, key=lambda step: step[0]) - 1][1]

    def __str__(self) -> str:
        """Returns the choice in words, for the log."""
        (_, first), *others = self.steps
        return NAMES[first] + "".join(
            f", {NAMES[version]} in steps of {rows:,} rows and more" for rows, version in others
        )


@dataclass(frozen=True)
class Times:
    """How long attention takes on one GPU, as in the files in `times/`."""

    gpu: str  # its name
    layers: Sequence[Mapping[str, Any]]
    """Each kind of layer that was measured: a `LayerKind`'s fields, and in `ms` the time of each
    version, if it can run, in steps of canvases that all have the same `context` before them."""

    @classmethod
    def from_json(cls, file: Mapping[str, Any]) -> "Times":
        """Returns the times of `file`, the contents of one in `times/`."""
        return cls(file["gpu"], file["layers"])

    @classmethod
    def shipped(cls, capability: tuple[int, int]) -> "Times | None":
        """Returns the times shipped for GPUs of this compute capability. Returns None if none
        are."""
        path = _SHIPPED / "sm_{}{}.json".format(*capability)
        return cls.from_json(json.loads(path.read_text())) if path.exists() else None

    def choose(self, layer: LayerKind, longest: int) -> Choice | None:
        """Returns the versions that a kind of layer runs. Returns None if no times are known.
        `longest`: tokens of the longest request.

        What was measured with R rows holds from R / 2 rows on. With half the heads, as on two
        tensor-parallel ranks, a step of twice the rows is as much work.
        """
        kinds = {(each["head_size"], each["has_window"]): each for each in self.layers}
        if (measured := kinds.get((layer.head_size, layer.has_window))) is None:
            return None
        cells, steps = measured["ms"], list[tuple[int, Version]]()
        for rows in sorted({cell["rows"] for cell in cells}):
            of_rows = [cell for cell in cells if cell["rows"] == rows]
            most = max(longest, min(cell["context"] for cell in of_rows))
            version = _least_worst([cell for cell in of_rows if cell["context"] <= most])
            if not steps:
                steps.append((0, version))
            elif steps[-1][1] != version:
                begin = rows / 2 * measured["num_heads"] / layer.num_heads
                steps.append((math.ceil(begin), version))
        return Choice(tuple(steps)) if steps else None


def _least_worst(cells: list[Mapping[str, Any]]) -> Version:
    """Returns the version whose largest ratio to the fastest one, over all cells, is the smallest.
    Versions within a factor of `EQUAL` count as equal, and the first of `VERSIONS` wins. `cells`:
    entries of `ms` in `Times.layers`. A version without a time cannot run."""
    times = [{version: cell.get(version, math.inf) for version in VERSIONS} for cell in cells]
    worst = {v: max(each[v] / min(each.values()) for each in times) for v in VERSIONS}
    least = min(worst.values())
    return next(version for version in VERSIONS if worst[version] <= least * EQUAL)
