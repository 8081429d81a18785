"""The metrics and labels that a dashboard's PromQL names."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.paths import ROOT
from vllm_dllm.metrics.prometheus import DRAFT_HISTOGRAMS, PREFIX

_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^{}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^()]*)\)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")


DASHBOARD = ROOT / "docs" / "dashboard.json"
_OF_DRAFTS = {
    f"{PREFIX}{name}_{part}" for name in DRAFT_HISTOGRAMS for part in ("bucket", "sum", "count")
}


class Query(NamedTuple):
    panel: str
    metrics: frozenset[str]
    labels: frozenset[str]  # of those metrics, though not of each

    @property
    def needs_drafter(self) -> bool:
        return self.metrics <= _OF_DRAFTS


def check(queries: Iterable[Query], scraped: str) -> set[str]:
    """That a server has each metric, and each label on one of those of its query. Returns the
    metrics, histograms by their name alone."""
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    shown: set[str] = set()
    for query in queries:
        assert query.metrics <= samples.keys(), query.panel
        assert query.labels <= set().union(*(samples[m] for m in query.metrics)), query.panel
        shown |= {re.sub("_(bucket|sum|count)$", "", name) for name in query.metrics}
    return shown


def queries() -> Iterator[Query]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
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
