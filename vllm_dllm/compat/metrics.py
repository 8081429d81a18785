"""vLLM's statistics carry numbers of ours, from a scheduler to the metrics of an API process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import Counter
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats


@dataclass
class CarryingStats(SpecDecodingStats):
    """Counts of drafts as vLLM sends them, and what travels with them.

    Canvases as drafts have no rate of acceptance per position, so none is counted: it takes a loop
    over every canvas' positions, and a longer message.
    """

    cargo: dict[str, Any] | None = None

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens


class Metrics(Protocol):
    def observe(self, cargo: Mapping[str, Any], engine: int) -> None: ...


_stock_init, _stock_observe = SpecDecodingProm.__init__, SpecDecodingProm.observe


def carry(make_metrics: Callable[[Sequence[str], Mapping[int, Sequence[Any]]], Metrics]) -> None:
    """In an API process of a diffusion model, `make_metrics` is called with the names of vLLM's
    labels and their values by engine, and what it makes observes each cargo. Repeatable."""
    # What messages to the API process are decoded as.
    SchedulerStats.__annotations__["spec_decoding_stats"] = CarryingStats | None

    def init(
        self: Any,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        is_diffusion: bool = False,
    ) -> None:
        _stock_init(self, speculative_config, labelnames, per_engine_labelvalues, is_diffusion)
        # Not where Ray collects the metrics: it has classes of its own for them.
        counts = is_diffusion and self._counter_cls is Counter
        self.of_canvases = make_metrics(labelnames, per_engine_labelvalues) if counts else None

    def observe(self: Any, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        _stock_observe(self, spec_decoding_stats, engine_idx)
        cargo = getattr(spec_decoding_stats, "cargo", None)
        if self.of_canvases is not None and cargo is not None:
            self.of_canvases.observe(cargo, engine_idx)

    SpecDecodingProm.__init__ = init
    SpecDecodingProm.observe = observe
