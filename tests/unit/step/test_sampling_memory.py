"""What a step of a large vocabulary takes stays within `sampling_memory_mib`, by the allocator's
own account, and within what the metrics count."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from vllm.v1.worker.gpu.sample import prompt_logprob

from tests import tolerances
from tests.unit.cpu.kernel_inputs import kernel_of
from tests.unit.step.batches import Filters, Model, canvas_batch
from vllm_dllm.compat import worker_logprobs
from vllm_dllm.denoise.bad_words import BadWords
from vllm_dllm.denoise.logit_rules import LogitRules, Penalties
from vllm_dllm.step.asked.logprob_tensors import LogprobRequest, token_logprobs
from vllm_dllm.step.logits.canvas_logits import (
    LogitTools,
    SamplingMemory,
    WholeLogits,
    most_step_bytes,
    rows_within_budget,
)
from vllm_dllm.step.logits.filters import RuleContext
from vllm_dllm.step.logits.masked_logits import MaskedLogits, RowDraws, RowNoise
from vllm_dllm.step.logits.soft_embedding import SoftEmbedding
from vllm_dllm.step.logits.streamed_logits import StreamedLogits

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("one_rank")]

V, H, C, NUM_CANVASES = 70_001, 8, 24, 8
ROWS, ALL = C * NUM_CANVASES, range(NUM_CANVASES)
BUDGET = 16 << 20
assert ROWS * V * 4 > 3 * BUDGET, "whole logits must not fit"
SMALL_V, SMALL_BUDGET = 3_001, 4 << 20


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(torch.randn(V, H, generator=torch.Generator().manual_seed(0)))


def penalties() -> LogitRules:
    seen = torch.zeros(V, dtype=torch.bool)
    return LogitRules(penalties=Penalties(1.0, 0.5, 1.2, torch.zeros(V), seen))


def bad_words() -> LogitRules:
    return LogitRules(bad_words=BadWords([[3, 4, 5], [6, 7]]))


def logits_of(
    model: Model, filters: Filters, num_canvases: int = NUM_CANVASES, **soft: float
) -> StreamedLogits:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(C * num_canvases, H, generator=generator)
    guesses = torch.randint(V, (num_canvases, C), generator=generator)
    starts = torch.zeros(num_canvases, dtype=torch.int64)
    batch, embedding = canvas_batch(C, [C] * num_canvases), SoftEmbedding(model, **soft)
    memory = SamplingMemory(BUDGET)
    context = RuleContext(batch, starts, guesses)
    return StreamedLogits(hidden, context, LogitTools(embedding, filters, memory))


def read(logits: StreamedLogits) -> None:
    rows = len(logits.hidden)
    logits.read(torch.full((rows, 1), 0.6), torch.rand(rows, dtype=torch.float64))


def report(logits: StreamedLogits) -> None:
    wanted = LogprobRequest(20, torch.tensor([], dtype=torch.int64))
    for i in range(NUM_CANVASES):
        for rows in logits.raw(i):
            temperature, tokens = torch.ones(len(rows), 1), torch.zeros(len(rows)).long()
            token_logprobs(rows, temperature, tokens, wanted, report_logits=False)


STEPS: dict[str, tuple[Callable[[StreamedLogits], None], Filters, dict[str, float]]] = {
    "exact": (read, Filters(), {}),
    "tolerance": (read, Filters(), {"tolerance": 0.01}),
    "top_k": (read, Filters(), {"top_k": 64}),
    "penalties": (read, Filters(penalties(), canvases=ALL), {}),
    "bad-words": (read, Filters(bad_words(), canvases=ALL), {}),
    "bias": (read, Filters(LogitRules(bias=torch.zeros(V)), canvases=ALL), {}),
    "top_p": (read, Filters(top_p=0.9, canvases=ALL), {}),
    "logprobs": (report, Filters(), {}),
}


def peak_bytes(compute: Callable[[], object]) -> int:
    """Most that torch held at once of what `compute` allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_to_its_budget(model: Model, name: str) -> None:
    step, filters, soft = STEPS[name]
    logits = logits_of(model, filters, **soft)
    step(logits)  # what is made once
    peak = peak_bytes(lambda: step(logits))
    counted = logits.memory.peak_bytes
    assert counted / 3 < peak <= counted <= BUDGET, f"{peak / 2**20:.1f} MiB"


def test_few_rows_count_as_few(model: Model) -> None:
    logits = logits_of(model, Filters(), num_canvases=1)
    read(logits)
    peak = peak_bytes(lambda: read(logits))
    assert peak <= logits.memory.peak_bytes < 2 * peak < BUDGET / 2


@pytest.mark.parametrize("asked", ["nothing", "top_p", "bias"])
@pytest.mark.parametrize("kind", ["diffusion", "masked"])
def test_whole_logits_count_too(kind: str, asked: str) -> None:
    """With what is made of some rows at a time; they themselves are there before."""
    small = Model(torch.randn(SMALL_V, H, generator=torch.Generator().manual_seed(0)))
    source = small.compute_logits(torch.randn(ROWS, H))
    memory = SamplingMemory(SMALL_BUDGET)
    batch, embedding = canvas_batch(C, [C] * NUM_CANVASES), SoftEmbedding(small)
    starts = torch.zeros(NUM_CANVASES, dtype=torch.int64)
    guesses = torch.zeros(NUM_CANVASES, C, dtype=torch.int64)
    rules = LogitRules(bias=torch.zeros(SMALL_V)) if asked == "bias" else None
    filters = Filters(rules, 0.9 if asked == "top_p" else None, ALL)

    def use() -> None:
        context = RuleContext(batch, starts, guesses)
        tools = LogitTools(embedding, filters, memory)
        temperature, draw = torch.full((ROWS, 1), 0.6), torch.rand(ROWS, dtype=torch.float64)
        if kind == "masked":
            made = MaskedLogits(source, context, tools)
            noise = RowNoise(batch, tools, temperature, draw, torch.zeros(ROWS, dtype=torch.bool))
            RowDraws(made, noise).draw_all()
        else:
            WholeLogits(source, context, tools).read(temperature, draw)

    use()
    held = source.nbytes + peak_bytes(use)
    assert memory.peak_bytes / 2 < held <= memory.peak_bytes
    assert memory.peak_bytes <= most_step_bytes(small, torch.float32, ROWS, SMALL_BUDGET)


@pytest.fixture
def stock_chunks() -> Iterator[None]:
    kernel_of("sample.logprob._ranks_kernel")  # the native ones
    yield
    worker_logprobs.limit_prompt_logprob_rows(1024)  # vLLM's own


def test_prompt_logprobs_keep_to_it_too(model: Model, stock_chunks: None) -> None:
    hidden = torch.randn(ROWS, H)

    def score() -> torch.Tensor:
        tokens = torch.arange(ROWS)
        score_in_chunks = prompt_logprob.compute_prompt_logprobs_with_chunking
        return score_in_chunks(tokens, hidden, model.compute_logits, 20)[1]

    whole = score()
    assert peak_bytes(score) > 3 * BUDGET
    worker_logprobs.limit_prompt_logprob_rows(rows_within_budget(V, BUDGET))
    assert BUDGET / 8 < peak_bytes(score) <= BUDGET
    tolerances.assert_within(score(), whole, 2 * tolerances.softmax(V, largest_logit=30.0))
