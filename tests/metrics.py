"""What is on `/metrics`, and what a trace says must be there."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import tolerances
from vllm_dllm.metrics.prometheus import DRAFT_HISTOGRAMS, HISTOGRAMS, PREFIX

Samples = Counter[tuple[str, frozenset[tuple[str, str]]]]
"""Values of our metrics by name and labels, those of the model and the engine left out."""


def ours(text: str) -> Samples:
    """Of a scraped text, of a server with one engine."""
    found = by_engine(text)
    assert found.keys() == {"0"}
    return found["0"]


def by_engine(text: str) -> dict[str, Samples]:
    """Of a scraped text."""
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                labels = dict(sample.labels)
                engine = labels.pop("engine")
                assert labels.pop("model_name")
                name = sample.name.removeprefix(PREFIX)
                found.setdefault(engine, Counter())[name, frozenset(labels.items())] += sample.value
    return found


def since(before: Samples, now: Samples) -> dict[str, float]:
    """What has changed, as `name` or `name label`."""
    changed = {key: value - before[key] for key, value in now.items() if value != before[key]}
    return {
        " ".join([name, *(value for _, value in sorted(labels))]): value
        for (name, labels), value in changed.items()
    }


def check_against(trace: Sequence[Mapping[str, Any]], changed: Mapping[str, float]) -> None:
    """Everything that the steps of a trace say of the metrics, which `changed` meanwhile."""
    last = [line for line in trace if line["finished"]]
    assert changed["denoise_steps_total"] == len(trace)
    assert changed["accepted_positions_total"] == sum(sum(line["accepted"]) for line in trace)
    finished = [v for k, v in changed.items() if k.startswith("canvases_finished_total ")]
    assert sum(finished) == len(last)
    check_histogram("block_denoise_steps", [line["step"] for line in last], changed)
    check_histogram("block_entropy_nats", [line["entropy"] for line in last], changed)
    assert changed["block_seconds_count"] == len(last)


def check_histogram(name: str, values: Sequence[float], changed: Mapping[str, float]) -> None:
    total = changed.get(f"{name}_sum", 0)
    assert total == pytest.approx(sum(values), rel=tolerances.total(256))
    bounds = (HISTOGRAMS | DRAFT_HISTOGRAMS)[name][1]
    filled = Counter(bisect_left(bounds, value) for value in values)
    below = 0
    for i, bound in enumerate((*bounds, float("inf"))):
        below += filled[i]
        le = "+Inf" if bound == float("inf") else str(float(bound))
        assert changed.get(f"{name}_bucket {le}", 0) == below, (name, le)
