"""What a dry run covered, as a table, and what none can."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.cuda_build.engine import Report

CANNOT = """\
Not covered, because nothing is computed: whether numbers are right; races between streams and
within kernels; registers, occupancy and whatever else a chip does with the code; time; how much
memory is taken; what compiled operations of vLLM and its libraries do with their arguments; other
ranks than the first."""


@dataclass(frozen=True)
class Line:
    """Of one test: its engine, or engines with alike settings."""

    test: str
    chip: str
    reports: list[Report]

    def cells(self) -> list[str]:
        facts = self.reports[0].facts
        kernels = set().union(*(report.kernels for report in self.reports))
        last = self.reports[-1]
        return [
            self.chip,
            self.test,
            f"{facts.get('graphs', '')}{', ahead' if facts.get('async') else ''}",
            ", ".join(facts.get("attention", ())),
            str(facts.get("cache", "")).removeprefix("torch."),
            ", ".join(facts.get("kernels", ())),
            f"{last.graphs} / {last.replays}",
            str(len(kernels)),
            str(sum(len(report.waits) for report in self.reports)),
            str(sum(len(report.forbidden) for report in self.reports)),
        ]


HEADER = [
    "chip",
    "test",
    "steps",
    "attention",
    "cache",
    "products with weights",
    "graphs / replays",
    "Triton kernels compiled",
    "waits",
    "forbidden in graphs",
]


def reports_of(result: Any) -> list[Report]:
    """In what a chore returned."""
    if isinstance(result, Report):
        return [result]
    if isinstance(result, Mapping):
        return [report for value in result.values() for report in reports_of(value)]
    return []


def table(lines: list[Line]) -> str:
    rows = [HEADER, ["---"] * len(HEADER), *(line.cells() for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
