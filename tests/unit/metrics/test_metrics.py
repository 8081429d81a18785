"""Numbers of canvases on their way from the worker to `/metrics`."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as strict_text
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.metrics import check_histogram, ours, since
from tests.paths import ROOT
from vllm_dllm import plugin
from vllm_dllm.compat.metrics import CanvasSpecDecodingStats
from vllm_dllm.compat.usage import (
    StepCounts,
    count_denoise_step,
    pop_step_counts,
    start_step_counts,
)
from vllm_dllm.denoise.step import CanvasState, StepOutcome
from vllm_dllm.metrics.canvas_numbers import CanvasRow
from vllm_dllm.metrics.prometheus import (
    BY_LABEL,
    COUNTERS,
    DRAFT_HISTOGRAMS,
    GAUGES,
    HISTOGRAMS,
    PREFIX,
    CanvasCounts,
    CanvasMetrics,
    CountedHistogram,
    DraftMetrics,
)
from vllm_dllm.requests.options import ACCEPTANCE_RULES, Mode
from vllm_dllm.scheduling.canvas_counter import CanvasCounter
from vllm_dllm.step.watched.observers import count_canvases

LABELS = ["model_name", "engine"]


@pytest.fixture
def metrics() -> Iterator[CanvasMetrics]:
    yield CanvasMetrics(LABELS, {0: ["m", "0"]})
    CanvasMetrics(LABELS, {})


def numbers(**columns: list[Any]) -> Any:
    """Of canvases 4 and 3 positions wide, in a grid of 4; the first reveals nothing."""
    ones = torch.ones(2, dtype=torch.long)
    known = {
        "accepted": [[1, 1, 0, 0], [1, 0, 0, 1]],
        "steps": [2, 2],
        "finished": [0, 1],
        "converged": [0, 0],
        "revealed": [0, 0],
        "denoises": [1, 1],
    } | columns
    at = {name: torch.tensor(value) for name, value in known.items()}
    batch = SimpleNamespace(
        requests_np=np.array([1, 3]),
        lengths_np=np.array([4, 3]),
        valid=torch.arange(4) < torch.tensor([[4], [3]]),
    )
    outcome = StepOutcome(
        canvas=torch.zeros(2, 4),
        accepted=at["accepted"].bool(),
        state=CanvasState(ones, ones, at["steps"], ones),
        finished=at["finished"].bool(),
        converged=at["converged"].bool(),
        revealed=at["revealed"].bool(),
    )
    entropy = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 0.0, 9.0]])
    inputs: Any = SimpleNamespace(batch=batch, drafts=None)
    stats = SimpleNamespace(entropy_nats=entropy)
    denoised: Any = SimpleNamespace(outcome=outcome, stats=stats, is_committed=None)
    settled: Any = SimpleNamespace(denoises=at["denoises"].bool())
    return count_canvases(inputs, denoised, settled, ())


def test_a_step_in_numbers() -> None:
    """Positions behind a canvas' end do not count."""
    assert list(numbers().rows()) == [
        CanvasRow(1, 4, 2, 2, 1.0, None),
        CanvasRow(3, 3, 2, 1, 1.0, "step_cap"),
    ]


@pytest.mark.parametrize("cause", ["converged", "revealed"])
def test_causes(cause: str) -> None:
    assert [row.cause for row in numbers(**{cause: [0, 1]}).rows()] == [None, cause]


def test_what_is_not_denoised_is_not_counted() -> None:
    assert [row.step for row in numbers(denoises=[1, 0]).rows()] == [2, 0]


def counted(*steps: dict[str, Any]) -> CanvasCounts:
    """Of requests `b` and `d`, which have room for 4 positions; `d` has been aborted."""
    counter = CanvasCounter(lambda request: 4, joins_canvases=True)
    request: Any = NamedRequest("b")
    for step in steps:
        output = ModelRunnerOutput(req_ids=list("abcd"), req_id_to_index={})
        output.canvas_numbers = numbers(**step)
        scheduled: Any = SimpleNamespace(total_num_scheduled_tokens=9, scheduled_at=0.0)
        counter.count_step(scheduled, output, {"b": request})
    counter.count_emitted_block(request, spares_commit=False)
    return counter.pop_counts()


class NamedRequest:
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def test_the_engine_counts() -> None:
    counts = counted({"steps": [1, 1], "finished": [0, 0]}, {"finished": [1, 1]})
    assert (counts.forwards, counts.denoise_steps, counts.accepted_positions) == (2, 4, 6)
    assert counts.canvases_finished == {"step_cap": 2}
    assert counts.block_denoise_steps == [2, 2] and counts.block_entropy_nats == [1.0, 1.0]
    assert len(counts.block_seconds) == 1 and counts.canvases_cut == 0
    assert counts.commits == {"shared": 1}


def test_a_commit_of_its_own() -> None:
    assert counted({"denoises": [0, 1]}).commits == {"own": 1}


def test_what_is_counted_arrives(metrics: CanvasMetrics) -> None:
    plugin.register()
    stats = CanvasSpecDecodingStats(num_spec_tokens=4)
    stats.observe_draft(4, num_accepted_tokens=4)
    stats.canvas_counts = vars(counted({"steps": [1, 1], "finished": [1, 0]}))
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=stats))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    found = arrived.scheduler_stats.spec_decoding_stats
    assert found == stats and found.canvas_counts["block_denoise_steps"] == [1]
    metrics.observe(found.canvas_counts, engine=0)
    samples = ours(generate_latest(REGISTRY).decode())
    assert samples["denoise_steps_total", frozenset()] == 2
    assert samples["commits_total", frozenset({("forward", "shared")})] == 1
    assert samples["block_denoise_steps_bucket", frozenset({("le", "1.0")})] == 1
    text = strict_text(REGISTRY, escaping="allow-utf-8").decode()  # a colon is kept as it is
    families = {family.name for family in openmetrics(text)}
    assert {PREFIX + name for name in (*COUNTERS, *GAUGES, *BY_LABEL, *HISTOGRAMS)} <= families


def test_steps_of_a_request_arrive() -> None:
    """Two steps that denoise, of which the second commits the block before, and a commit."""
    request: Any = NamedRequest("b")
    start_step_counts(request, most_tokens=4)
    for num_accepted in (0, 4):
        count_denoise_step(request)
        request.spec_decode_metrics.observe(4, num_accepted)
    request.spec_decode_metrics.observe(3, 3)
    output = EngineCoreOutput("b", [7], spec_decode_metrics=request.spec_decode_metrics)
    sent = EngineCoreOutputs(outputs=[output])
    (arrived,) = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent)).outputs
    assert pop_step_counts(arrived) == StepCounts(denoise_steps=2, forwards=3)
    assert pop_step_counts(arrived) is None


def test_memory_is_what_the_last_step_says(metrics: CanvasMetrics) -> None:
    counter = CanvasCounter(lambda request: 4, joins_canvases=True)
    scheduled: Any = SimpleNamespace(total_num_scheduled_tokens=9, scheduled_at=0.0)
    output = ModelRunnerOutput(req_ids=list("abcd"), req_id_to_index={})
    for peak in (30, 50):
        said = numbers()._replace(sampling_peak_bytes=peak, sampling_bound_bytes=80)
        output.canvas_numbers = said
        counter.count_step(scheduled, output, {})
        metrics.observe(vars(counter.pop_counts()), engine=0)
    metrics.observe(vars(counter.pop_counts()), engine=0)
    samples = ours(generate_latest(REGISTRY).decode())
    assert samples["sampling_memory_peak_bytes", frozenset()] == 50
    assert samples["sampling_memory_bound_bytes", frozenset()] == 80


@pytest.fixture
def drafting() -> Iterator[Callable[[str], Any]]:
    """Makes vLLM's metrics of a server that drafts by a method."""
    plugin.register()

    def make(method: str) -> Any:
        unregister_vllm_metrics()
        drafter = SimpleNamespace(architectures=["DFlashDraftModel"])
        speculative: Any = SimpleNamespace(
            method=method, draft_model_config=drafter, num_speculative_tokens=4
        )
        return PrometheusStatLogger._spec_decoding_cls(speculative, LABELS, {0: ["m", "0"]})

    yield make
    unregister_vllm_metrics()
    DraftMetrics(LABELS, {})


def test_lengths_and_widths_of_drafts(drafting: Callable[[str], Any]) -> None:
    """As they travel between an engine and its API process, which has them by position alone."""
    metrics = drafting("dflash")
    before = ours(generate_latest(REGISTRY).decode())
    steps = [[(4, 4), (4, 0), (2, 1)], [(0, 0)], [(1, 1), (3, 2)]]
    for step in steps:
        stats = SpecDecodingStats.new(4)
        for num_drafts, num_accepted in step:
            stats.observe_draft(num_drafts, num_accepted)
        sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=stats))
        arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
        metrics.observe(arrived.scheduler_stats.spec_decoding_stats)
    changed = since(before, ours(generate_latest(REGISTRY).decode()))
    drafts = [draft for step in steps for draft in step]
    check_histogram("draft_width", [width for width, _ in drafts], changed)
    check_histogram("acceptance_length", [1 + accepted for _, accepted in drafts], changed)
    assert changed["draft_width_count"] == changed["acceptance_length_count"] == len(drafts)


def test_many_at_once_are_as_one_by_one() -> None:
    """In everything that the client says of a histogram, but when it was made."""
    one_by_one, at_once = (
        CountedHistogram("h", "", buckets=(1, 2, 4), registry=None) for _ in "ab"
    )
    for value, times in ((0, 1), (1, 2), (3, 3), (4, 1), (5, 2)):
        for _ in range(times):
            one_by_one.observe(value)
        at_once.observe_many(value, times)
    said, found = (
        [(sample.name, sample.labels, sample.value) for sample in histogram.collect()[0].samples]
        for histogram in (one_by_one, at_once)
    )
    assert len(said) == 7 and said[:-1] == found[:-1]


def test_models_that_are_not_ours_have_no_metrics(drafting: Callable[[str], Any]) -> None:
    for metrics in (
        drafting("ngram"),
        PrometheusStatLogger._spec_decoding_cls(None, LABELS, {0: ["m", "0"]}),
    ):
        metrics.observe(SpecDecodingStats.new(4))
        assert metrics.canvas_metrics is None and metrics.draft_metrics is None


def test_every_count_is_a_metric() -> None:
    names = {field.name for field in fields(CanvasCounts)}
    assert names == {*COUNTERS, *GAUGES, *BY_LABEL, *HISTOGRAMS}


def test_every_rule_of_acceptance_has_a_series() -> None:
    assert {*BY_LABEL["requests"][1], "diffusion"} == {*ACCEPTANCE_RULES, *get_args(Mode)}


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    totals = (f"{name}_total" for name in (*COUNTERS, *BY_LABEL))
    for name in (*totals, *GAUGES, *HISTOGRAMS, *DRAFT_HISTOGRAMS):
        assert f"| `{PREFIX}{name}" in page, name
