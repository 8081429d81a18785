"""The metrics on `/metrics` of a server with a DFlash drafter. docs/metrics.md explains them."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from prometheus_client import REGISTRY, Histogram

from vllm_dllm.metrics.prometheus import PREFIX

_EACH = (*range(1, 17), 24, 32)  # exact for blocks of up to 16

DRAFT_HISTOGRAMS = {
    "acceptance_length": (
        "Tokens that each verification emits: the drafts that it accepts, and the target's own.",
        _EACH,
    ),
    "draft_width": ("Drafts that each verification looks at.", _EACH),
}


class CountedHistogram(Histogram):
    """Takes equal values at once: hundreds of requests have few different ones."""

    def observe_many(self, value: int, times: int) -> None:
        """Observes a value so many times, for which Prometheus' client has no way."""
        self._sum.inc(value * times)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)


_registered: list[CountedHistogram] = []


class DraftMetrics:
    """The metrics of the engines whose statistics come to this process."""

    def __init__(
        self, labelnames: Sequence[str], labels_by_engine: Mapping[int, Sequence[Any]]
    ) -> None:
        # As vLLM does with its own: a process may come to make others.
        while _registered:
            REGISTRY.unregister(_registered.pop())
        histograms = {
            name: CountedHistogram(PREFIX + name, text, labelnames, buckets=buckets)
            for name, (text, buckets) in DRAFT_HISTOGRAMS.items()
        }
        _registered.extend(histograms.values())
        self._of_engine = {
            engine: {name: h.labels(*labels) for name, h in histograms.items()}
            for engine, labels in labels_by_engine.items()
        }

    def observe(
        self, num_verified: int, accepted: Sequence[int], drafted: Sequence[int], engine: int
    ) -> None:
        """`accepted`, `drafted`: in how many of the `num_verified` drafts each position was
        accepted, and in how many there was one."""
        metrics = self._of_engine[engine]
        for length, times in lengths(num_verified, accepted):
            metrics["acceptance_length"].observe_many(1 + length, times)
        for width, times in lengths(num_verified, drafted):
            metrics["draft_width"].observe_many(width, times)


def lengths(count: int, reached: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The lengths of `count` runs from the left, and how many have each; `reached[i]` of them have
    position `i`."""
    for length, (longer, further) in enumerate(pairwise((count, *reached, 0))):
        if longer > further:
            yield length, longer - further
