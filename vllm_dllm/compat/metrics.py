"""Numbers of canvases in vLLM's statistics, which carry them from a scheduler to the API server: to
its metrics, and to the `usage` of each request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request
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


_SpecDecodingStats = CanvasSpecDecodingStats | None

Labels = Mapping[int, Sequence[Any]]  # values of labels by engine


class CanvasMetrics(Protocol):
    """Observes the `canvas_counts` of an engine's step."""

    def observe(self, canvas_counts: Mapping[str, Any], engine: int) -> None: ...


class DraftMetrics(Protocol):
    """Observes the drafts of an engine's step: how many requests verified some, and accepted and
    drafted tokens by position."""

    def observe(
        self, num_verified: int, accepted: Sequence[int], drafted: Sequence[int], engine: int
    ) -> None: ...


def set_metrics(
    make_canvas_metrics: Callable[[Sequence[str], Labels], CanvasMetrics],
    make_draft_metrics: Callable[[Sequence[str], Labels], DraftMetrics],
) -> None:
    """Has our metrics made and updated beside vLLM's own, by a patch of its logger. Metrics of
    canvases count `canvas_counts` of diffusion models. Metrics of drafts count vLLM's numbers per
    position, where a DFlash drafter is served. Repeatable.

    The two functions get vLLM's label names, and label values by engine. Ray has metric classes of
    its own and collects neither.
    """
    # What messages to the API process are decoded as.
    set_entry(
        "v1.metrics.stats:SchedulerStats.__annotations__", "spec_decoding_stats", _SpecDecodingStats
    )

    def make(stock: Any) -> Any:
        """Returns a subclass of vLLM's metrics of drafts, `stock`, that also has ours."""

        class Metrics(stock):
            """vLLM's metrics of drafts and, where they apply, ours of canvases or drafts."""

            def __init__(
                self,
                speculative_config: Any,
                labelnames: list[str],
                per_engine_labelvalues: dict[int, list[object]],
                is_diffusion: bool = False,
            ) -> None:
                """Makes vLLM's metrics, and ours for a diffusion model or a DFlash drafter."""
                super().__init__(
                    speculative_config, labelnames, per_engine_labelvalues, is_diffusion
                )
                labels = (labelnames, per_engine_labelvalues)
                self.canvas_metrics = make_canvas_metrics(*labels) if is_diffusion else None
                drafts = is_dflash(speculative_config)
                self.draft_metrics = make_draft_metrics(*labels) if drafts else None

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

    patch("v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls", make)


class StepCounts(NamedTuple):
    """Counts of the steps of a finished answer."""

    denoise_steps: int
    forwards: int  # of its canvases; those of its prompt are not counted


class RequestSteps(RequestSpecDecodeMetrics):
    """The steps of one request, carried in vLLM's counts of its drafts.

    Entry 0 of `histogram` counts denoise steps apart from forwards, since one step may denoise a
    canvas and commit it. The two lists have an entry for each forward.
    """

    def count_denoise_step(self) -> None:
        """Adds 1 to entry 0 of `histogram`, which `observe` leaves alone."""
        self.histogram[0] += 1

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Counts a forward of the request's canvas: adds an entry to both lists, and counts
        `num_accepted` in `histogram` unless it is 0."""
        self.num_draft_tokens += num_draft_tokens
        self.per_step_drafted.append(num_draft_tokens)
        self.per_step_accepted.append(num_accepted)
        if num_accepted > 0:
            self.histogram[num_accepted] += 1


def start_step_counts(request: Request, most_tokens: int) -> None:
    """Has the steps of `request` counted from now on. `most_tokens`: of a canvas."""
    request.spec_decode_metrics = RequestSteps.new(most_tokens)


def count_denoise_step(request: Request) -> None:
    """Adds a denoise step to the counts of `request`, if its steps are counted."""
    if isinstance(request.spec_decode_metrics, RequestSteps):
        request.spec_decode_metrics.count_denoise_step()


def pop_step_counts(output: Any) -> StepCounts | None:
    """Returns the step counts of a finished answer, None for an unfinished one. Removes them from
    `output`, vLLM's CompletionOutput, since vLLM would show them as drafts."""
    counts, output.spec_decode_metrics = output.spec_decode_metrics, None
    return None if counts is None else StepCounts(counts.histogram[0], len(counts.per_step_drafted))
