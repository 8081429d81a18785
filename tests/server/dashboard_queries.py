"""The metrics and labels that a dashboard's PromQL names."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^{}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^()]*)\)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")


class Query(NamedTuple):
    panel: str
    metrics: frozenset[str]
    labels: frozenset[str]  # of those metrics, though not of each

    @property
    def needs_drafter(self) -> bool:
        return any("spec_decode" in name for name in self.metrics)


def queries(path: Path) -> Iterator[Query]:
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield _query(panel["title"], target["expr"], target["legendFormat"])


def _query(panel: str, promql: str, legend: str) -> Query:
    selectors = _SELECTOR.findall(promql)
    metrics = frozenset(name for name, _ in selectors)
    # Every name of a metric has a selector, or it would be overlooked here.
    named = re.findall(r"\b(vllm\w*:\w+)", promql)
    assert metrics == set(named), promql
    labels = {label for _, matchers in selectors for label in _MATCHER.findall(matchers)}
    for group in _GROUPED.findall(promql):
        labels |= {label.strip() for label in group.split(",")}
    return Query(panel, metrics, frozenset(labels | set(_LEGEND.findall(legend))))
