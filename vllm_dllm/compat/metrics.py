"""vLLM's statistics carry numbers of ours from a scheduler to an API process: to its metrics, and
those of each request to `usage`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.compat.drafting import is_dflash
from vllm_dllm.compat.patching import put, replace


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


_OnTheWay = CarryingStats | None

Labels = Mapping[int, Sequence[Any]]  # by engine


class CanvasMetrics(Protocol):
    def observe(self, cargo: Mapping[str, Any], engine: int) -> None: ...


class DraftMetrics(Protocol):
    def observe(
        self, num_verified: int, accepted: Sequence[int], drafted: Sequence[int], engine: int
    ) -> None: ...


def carry(
    make_canvas_metrics: Callable[[Sequence[str], Labels], CanvasMetrics],
    make_draft_metrics: Callable[[Sequence[str], Labels], DraftMetrics],
) -> None:
    """Metrics of canvases and drafts are made, with the names of vLLM's labels and their values by
    engine, and observe what arrives: canvases of a diffusion model each cargo, drafts of a DFlash
    drafter vLLM's counts by position. Ray, which has classes of its own, collects none of them.
    Repeatable."""
    # What messages to the API process are decoded as.
    put("v1.metrics.stats:SchedulerStats.__annotations__", "spec_decoding_stats", _OnTheWay)

    def make(stock: Any) -> Any:
        class Metrics(stock):
            def __init__(
                self,
                speculative_config: Any,
                labelnames: list[str],
                per_engine_labelvalues: dict[int, list[object]],
                is_diffusion: bool = False,
            ) -> None:
                super().__init__(
                    speculative_config, labelnames, per_engine_labelvalues, is_diffusion
                )
                labels = (labelnames, per_engine_labelvalues)
                self.of_canvases = make_canvas_metrics(*labels) if is_diffusion else None
                drafts = is_dflash(speculative_config)
                self.of_drafts = make_draft_metrics(*labels) if drafts else None

            def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
                super().observe(spec_decoding_stats, engine_idx)
                cargo = getattr(spec_decoding_stats, "cargo", None)
                if self.of_canvases is not None and cargo is not None:
                    self.of_canvases.observe(cargo, engine_idx)
                if self.of_drafts is not None:
                    self.of_drafts.observe(
                        spec_decoding_stats.num_drafts,
                        spec_decoding_stats.num_accepted_tokens_per_pos,
                        spec_decoding_stats.num_draft_tokens_per_pos,
                        engine_idx,
                    )

        return Metrics

    replace("v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls", make)


class Steps(NamedTuple):
    denoise_steps: int
    forwards: int  # of its canvases; those of its prompt are not counted


class RequestSteps(RequestSpecDecodeMetrics):
    """The steps of one request, carried as vLLM's counts of its drafts are.

    Has entry 0 of `histogram` for denoise steps, since a step may denoise a canvas and commit
    it, and an entry of the two lists for each forward.
    """

    def count_denoise_step(self) -> None:
        """Adds to entry 0 of `histogram`, which `observe` leaves alone."""
        self.histogram[0] += 1

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        self.num_draft_tokens += num_draft_tokens
        self.per_step_drafted.append(num_draft_tokens)
        self.per_step_accepted.append(num_accepted)
        if num_accepted > 0:
            self.histogram[num_accepted] += 1


def count_steps(request: Request, most_tokens: int) -> None:
    """Counts the steps of a request from now on. `most_tokens`: of a canvas."""
    request.spec_decode_metrics = RequestSteps.new(most_tokens)


def count_denoise_step(request: Request) -> None:
    """A step has denoised the request's canvas."""
    if isinstance(request.spec_decode_metrics, RequestSteps):
        request.spec_decode_metrics.count_denoise_step()


def take_steps(output: Any) -> Steps | None:
    """Returns the steps of a finished answer, and None for one that goes on. They are taken out,
    since vLLM would show them as drafts."""
    counts, output.spec_decode_metrics = output.spec_decode_metrics, None
    return None if counts is None else Steps(counts.histogram[0], len(counts.per_step_drafted))
