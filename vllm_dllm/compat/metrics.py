"""Numbers of canvases in vLLM's statistics, which carry them to the API server's metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.compat.drafting import is_dflash
from vllm_dllm.compat.patching import patch, set_entry


@dataclass
class CanvasSpecDecodingStats(SpecDecodingStats):
    """vLLM's counts of drafts of a step, with those of canvases added.

    Acceptance per position means nothing for canvases, so it is not counted: it would take a loop
    over every canvas' positions, and a longer message.
    """

    canvas_counts: dict[str, Any] | None = None
    """Fields of `CanvasCounts` by name. None: no canvas is counted."""

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens


def add_canvas_and_draft_metrics(
    canvas_class: Callable[..., Any], draft_class: Callable[..., Any]
) -> None:
    """Has our metrics made and updated beside vLLM's own. Repeatable. Ray has metric classes of its
    own and collects none of ours.

    Patches the type that messages to the API process are decoded as, so that they carry the counts
    of canvases, and the class of metrics that vLLM's Prometheus logger makes.

    Args:
        canvas_class: `metrics.prometheus.CanvasMetrics`, made for diffusion models.
        draft_class: `metrics.prometheus.DraftMetrics`, made where a DFlash drafter is served.
    """
    set_entry(
        "v1.metrics.stats:SchedulerStats.__annotations__",
        "spec_decoding_stats",
        CanvasSpecDecodingStats | None,
    )

    def extend(stock: Any) -> Any:
        """Returns a subclass of vLLM's class of metrics `stock` that also has ours."""

        class Metrics(stock):
            """vLLM's metrics of drafts and, where they apply, ours of canvases or drafts."""

            def __init__(
                self,
                speculative_config: Any,
                labelnames: list[str],
                per_engine_labelvalues: dict[int, list[object]],
                is_diffusion: bool = False,
            ) -> None:
                labels = (labelnames, per_engine_labelvalues)
                super().__init__(speculative_config, *labels, is_diffusion)
                self.canvas_metrics = canvas_class(*labels) if is_diffusion else None
                self.draft_metrics = draft_class(*labels) if is_dflash(speculative_config) else None

            def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
                """Adds a step's statistics to vLLM's metrics and to ours."""
                super().observe(spec_decoding_stats, engine_idx)
                canvas_counts = getattr(spec_decoding_stats, "canvas_counts", None)
                if self.canvas_metrics is not None and canvas_counts is not None:
                    self.canvas_metrics.observe(canvas_counts, engine_idx)
                if self.draft_metrics is not None:
                    self.draft_metrics.observe(
                        spec_decoding_stats.num_drafts,
                        spec_decoding_stats.num_accepted_tokens_per_pos,
                        spec_decoding_stats.num_draft_tokens_per_pos,
                        engine_idx,
                    )

        return Metrics

    patch("v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls", extend)
