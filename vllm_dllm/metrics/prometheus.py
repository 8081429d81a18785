"""Metrics on `/metrics` whose names begin with `vllm_dllm:`. docs/metrics.md explains them."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

PREFIX = "vllm_dllm:"
CAUSES = ("converged", "revealed", "step_cap")
COMMITS = ("shared", "own", "none")
ACCEPTANCES = (
    *("entropy_bound", "confidence", "top_k", "in_order", "verified"),
    *("self_speculation", "autoregressive"),
)

COUNTERS = {
    "forwards": "Forwards of the model.",
    "denoise_steps": "Denoise steps, one for each canvas that a forward denoised.",
    "accepted_positions": (
        "Canvas positions that held their tokens after a denoise step, summed over the steps."
    ),
    "canvases_cut": "Finished canvases that the end of the context made narrower.",
}

GAUGES = {
    "sampling_memory_peak_bytes": (
        "Most that a step has taken for logits and what is made of them, by the sizes of its tiles."
    ),
    "sampling_memory_bound_bytes": "Most that a step may take for them.",
}

BY_LABEL = {
    "canvases_finished": ("cause", CAUSES, "Finished canvases, by what finished them."),
    "commits": (
        "forward",
        COMMITS,
        "Emitted blocks, by the forward that commits them: shared with the next block's first "
        "step, their own, or none.",
    ),
    "requests": ("acceptance", ACCEPTANCES, "Requests received, by their rule of acceptance."),
}
"""Counters with a label of their own -> the label, its values and the explanation."""

HISTOGRAMS = {
    "block_denoise_steps": (
        "Denoise steps of each finished canvas.",
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256),
    ),
    "block_entropy_nats": (
        "Mean entropy of each finished canvas in its last step, in nats.",
        (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3),
    ),
    "block_seconds": (
        "Seconds from the scheduling of each finished canvas' first step to its last step's end.",
        (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100),
    ),
}
"""Histograms -> the explanation and the upper bounds of their buckets."""


@dataclass
class CanvasCounts:
    """What the engine's process counts between two messages to an API process. Each field is for
    the metric of its name."""

    forwards: int = 0
    denoise_steps: int = 0
    accepted_positions: int = 0
    canvases_cut: int = 0
    # As the last step says; 0: there was none
    sampling_memory_peak_bytes: int = 0
    sampling_memory_bound_bytes: int = 0
    canvases_finished: Tally[str] = field(default_factory=Tally)  # by cause
    commits: Tally[str] = field(default_factory=Tally)  # by forward
    requests: Tally[str] = field(default_factory=Tally)  # by acceptance
    block_denoise_steps: list[int] = field(default_factory=list)
    block_entropy_nats: list[float] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)


class EngineMetrics(ABC):
    """Metrics of all engines that send statistics to this process. A subclass defines them."""

    _registered: ClassVar[Iterable[Any]] = ()

    def __init__(
        self, labelnames: Sequence[str], labels_by_engine: Mapping[int, Sequence[Any]]
    ) -> None:
        """Makes and registers the metrics. `labels_by_engine`: the values of `labelnames`.
        Unregisters those of an earlier instance, as vLLM does with its own: a process may make them
        anew."""
        for metric in self._registered:
            REGISTRY.unregister(metric)
        series = dict(self._make_series(labelnames))
        type(self)._registered = {metric for metric, *_ in series.values()}
        # All series exist from the start, because a rate misses a new series' first value.
        self._by_engine = {
            engine: {key: metric.labels(*labels, *own) for key, (metric, *own) in series.items()}
            for engine, labels in labels_by_engine.items()
        }

    @abstractmethod
    def _make_series(self, labelnames: Sequence[str]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Makes the metrics. Yields the key of each series, and its metric with the values of the
        labels that it has after `labelnames`."""


class CanvasMetrics(EngineMetrics):
    """Metrics of canvases."""

    def _make_series(self, labelnames: Sequence[str]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Makes the metrics. Keys are names, or (name, value) of those in `BY_LABEL`."""
        for name, text in COUNTERS.items():
            yield name, (Counter(PREFIX + name, text, labelnames),)
        for name, text in GAUGES.items():
            # With several API processes, each gets a part of an engine's messages.
            gauge = Gauge(PREFIX + name, text, labelnames, multiprocess_mode="mostrecent")
            yield name, (gauge,)
        for name, (text, buckets) in HISTOGRAMS.items():
            yield name, (Histogram(PREFIX + name, text, labelnames, buckets=buckets),)
        for name, (label, values, text) in BY_LABEL.items():
            counter = Counter(PREFIX + name, text, (*labelnames, label))
            for value in values:
                yield (name, value), (counter, value)

    def observe(self, counts: Mapping[str, Any], engine: int) -> None:
        """Adds `counts`, the fields of `CanvasCounts` by name, to the metrics of `engine`."""
        metrics = self._by_engine[engine]
        for name in COUNTERS:
            metrics[name].inc(counts[name])
        for name in GAUGES:
            if counts[name]:
                metrics[name].set(counts[name])
        for name in BY_LABEL:
            for value, number in counts[name].items():
                metrics[name, value].inc(number)
        for name in HISTOGRAMS:
            for value in counts[name]:
                metrics[name].observe(value)


_LENGTHS = (*range(1, 17), 24, 32)  # exact for blocks of up to 16

DRAFT_HISTOGRAMS = {
    "acceptance_length": (
        "Tokens that each verification emits: the drafts that it accepts, and the target's own.",
        _LENGTHS,
    ),
    "draft_width": ("Drafts that each verification looks at.", _LENGTHS),
}


class CountedHistogram(Histogram):
    """A histogram that observes many equal values in one call, as hundreds of requests have."""

    def observe_many(self, value: int, times: int) -> None:
        """Observes `value` `times` times, which Prometheus' client has no method for."""
        self._sum.inc(value * times)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)


class DraftMetrics(EngineMetrics):
    """Metrics of drafts."""

    def _make_series(self, labelnames: Sequence[str]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Makes the histograms. Keys are their names."""
        for name, (text, buckets) in DRAFT_HISTOGRAMS.items():
            yield name, (CountedHistogram(PREFIX + name, text, labelnames, buckets=buckets),)

    def observe(
        self, num_verified: int, accepted: Sequence[int], drafted: Sequence[int], engine: int
    ) -> None:
        """Adds one step's verified drafts to the histograms of `engine`. `num_verified`: requests
        with a verified draft. `accepted[i]`, `drafted[i]`: how many of these requests accepted a
        token at position i, and had one there."""
        metrics = self._by_engine[engine]
        for length, times in count_run_lengths(num_verified, accepted):
            metrics["acceptance_length"].observe_many(1 + length, times)
        for width, times in count_run_lengths(num_verified, drafted):
            metrics["draft_width"].observe_many(width, times)


def count_run_lengths(count: int, reached: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields each length that some of `count` runs have, and how many have it. All runs start at
    position 0. `reached[i]`: how many runs have position `i`."""
    for length, (longer, further) in enumerate(pairwise((count, *reached, 0))):
        if longer > further:
            yield length, longer - further
