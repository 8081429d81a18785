"""What canvases add to vLLM's statistics of a step."""

from typing import Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.compat.metrics import CarryingStats
from vllm_dllm.compat.scheduler import SchedulerHooks
from vllm_dllm.scheduling.block_spans import BlockSpans
from vllm_dllm.scheduling.canvas_counter import CanvasCounter
from vllm_dllm.scheduling.families import UniformCanvases


class CountedScheduling(SchedulerHooks):
    """Added to a scheduler. Counts canvases where vLLM counts anything, and commits that were not
    run in any case, because vLLM's clients compute with them."""

    counter: CanvasCounter | None = None
    spared_commits: list[int]  # widths, until they are in the statistics

    def count_for(self, family: UniformCanvases) -> None:
        self.spared_commits = []
        if not self.log_stats:
            return
        traces = self.vllm_config.observability_config.otlp_traces_endpoint is not None
        self.counter = CanvasCounter(
            family.width,
            BlockSpans() if traces else None,
            joins_canvases=family.joins_canvases and not family.is_seeded,
        )

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        stats = spec_decoding_stats or CarryingStats(self.num_spec_tokens)
        return super().make_spec_decoding_stats(stats, *args, **kwargs)

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Counts a saved commit as a step, because vLLM's clients compute the denoise steps as all
        steps minus one commit per canvas. This includes a last block that was committed because
        its end was not foreseen (`requests/ends.py`)."""
        if spec_decoding_stats is not None:
            for width in self.spared_commits:
                spec_decoding_stats.observe_draft(width, num_accepted_tokens=0)
        if self.counter is not None and isinstance(spec_decoding_stats, CarryingStats):
            spec_decoding_stats.cargo = vars(self.counter.take())
        self.spared_commits.clear()
        return super().make_stats(spec_decoding_stats, *args, **kwargs)
