"""Logits that are read tile by tile against the same logits, whole."""

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import tolerances
from tests.unit.step.batches import Filters, Model, canvas_batch
from vllm_dllm.denoise.bad_words import BadWords
from vllm_dllm.denoise.impossible import BAD_WORD_LOGIT
from vllm_dllm.denoise.logit_rules import LogitRules
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.step.logits import soft_embedding
from vllm_dllm.step.logits.canvas_logits import (
    LogitTools,
    SamplingMemory,
    WholeLogits,
    most_step_bytes,
)
from vllm_dllm.step.logits.filters import RuleContext
from vllm_dllm.step.logits.soft_embedding import SoftEmbedding
from vllm_dllm.step.logits.streamed_logits import (
    CACHED_TILE,
    TILE_TOKENS,
    StreamedLogits,
    tile_shape,
)

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("one_rank")]

V, H, C, LENGTHS = 20_000, 16, 24, [24, 10, 17]
ROWS = sum(LENGTHS)
MIB = 1 << 20
LARGEST = 80.0  # logit: capped at 30, and divided by a temperature of 0.4 or more; a bias of 5 more
# Of a logit of H terms: vectors of norm 2 sqrt(H) and sqrt(H), capped, biased and scaled.
OF_LOGITS = dict(rtol=0.0, atol=tolerances.dot_error() * 2 * H / 0.4 + tolerances.SHORT * LARGEST)


@pytest.fixture(scope="module")
def model() -> Model:
    generator = torch.Generator().manual_seed(0)
    return Model(2 * torch.randn(V, H, generator=generator))


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(1))


def make(
    kind: type,
    source: torch.Tensor,
    model: Model,
    rules: LogitRules | None = None,
    budget: int = MIB,
    guesses: torch.Tensor | None = None,
    **soft: object,
) -> WholeLogits | StreamedLogits:
    if guesses is None:
        guesses = torch.full((len(LENGTHS), C), NO_TOKEN)
    starts = torch.tensor([5, 50, 500])
    batch, embedding = canvas_batch(C, LENGTHS), SoftEmbedding(model, **soft)
    memory = SamplingMemory(budget)
    context = RuleContext(batch, starts, guesses)
    return kind(source, context, LogitTools(embedding, Filters(rules), memory))


def read(logits: WholeLogits | StreamedLogits):
    generator = torch.Generator().manual_seed(2)
    temperature = torch.rand(ROWS, 1, generator=generator) + 0.4
    return logits.read(temperature, torch.rand(ROWS, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("has_rules", [False, True])
@pytest.mark.parametrize("soft", [{}, {"top_k": 8}], ids=["all", "top_k"])
def test_streamed_is_whole(
    model: Model, hidden: torch.Tensor, soft: dict[str, int], has_rules: bool, is_tied: bool
) -> None:
    if not is_tied:
        model = Model(model.model.embed_tokens.weight, torch.randn(V, H))
    rules = None
    if has_rules:
        rules = LogitRules(bias=torch.linspace(-5, 5, V))
    whole = read(make(WholeLogits, model.compute_logits(hidden), model, rules, **soft))
    streamed = read(make(StreamedLogits, hidden, model, rules, **soft))
    assert torch.equal(streamed[0].best_guess, whole[0].best_guess)
    allowed = 2 * tolerances.entropy(V, LARGEST, spread=math.log(V))
    for name in ("entropy_nats", "best_logprob"):
        tolerances.assert_within(getattr(streamed[0], name), getattr(whole[0], name), allowed)
    longest = model.model.embed_tokens.weight.norm(dim=-1).max() * model.model.normalizer
    share = 2 * tolerances.softmax(V, LARGEST)
    assert (streamed[1] - whole[1]).norm(dim=-1).max() <= share * longest


def test_a_tolerance_is_kept(model: Model, hidden: torch.Tensor) -> None:
    """With what the step before took for best, or something else."""
    _, exact = read(make(StreamedLogits, hidden, model))
    longest = model.model.embed_tokens.weight.norm(dim=-1).max() * model.model.normalizer
    best = model.compute_logits(hidden).argmax(-1)
    canvases = canvas_batch(C, LENGTHS).unflatten(best)
    for guesses in (canvases, canvases.flip(-1), None):
        _, soft = read(make(StreamedLogits, hidden, model, guesses=guesses, tolerance=0.05))
        error = (soft - exact).norm(dim=-1).max()
        assert 0 < error <= 0.05 * longest


def test_rules_go_from_the_left_whatever_the_tiles(model: Model, hidden: torch.Tensor) -> None:
    """A bad word of three tokens across tiles of rows, a penalty for the guesses before."""
    plain = next(iter(make(WholeLogits, model.compute_logits(hidden), model).raw(1)))
    word = plain.argmax(-1)[4:7].tolist()
    rules = LogitRules(bad_words=BadWords([word]), stops_from=57)
    rules.early_stops = torch.tensor([3, 9])
    rows: list[torch.Tensor] = []
    for budget in (1, 3 * V * 32, 100 * MIB):  # one row, three, all
        tiles: Iterator[torch.Tensor] = make(
            StreamedLogits, hidden, model, rules, budget
        ).processed(1)
        tiles = list(tiles)
        assert len(tiles) == {1: 10, 3 * V * 32: 4, 100 * MIB: 1}[budget]
        rows.append(torch.cat(tiles))
    for other in rows[1:]:
        torch.testing.assert_close(other, rows[0], **OF_LOGITS)
    assert rows[0][6, word[2]] == BAD_WORD_LOGIT and rows[0][5, word[1]] > BAD_WORD_LOGIT
    assert (rows[0][:7, [3, 9]] == -1e20).all() and (rows[0][7:, [3, 9]] > -1e20).all()


def test_the_log_says_what_top_k_leaves_out(
    model: Model,
    hidden: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    logged: Callable[..., list[str]],
) -> None:
    lines = logged(soft_embedding, "info")
    monkeypatch.setattr(soft_embedding, "LOG_SECONDS", 0.0)
    logits = make(StreamedLogits, hidden, model, top_k=3, budget=100 * MIB)
    read(logits)
    probs = model.compute_logits(hidden)
    generator = torch.Generator().manual_seed(2)
    probs = (probs / (torch.rand(ROWS, 1, generator=generator) + 0.4)).softmax(-1)
    left_out = 100 * (1 - probs.topk(3).values.sum(-1))
    (line,) = lines
    logged = re.fullmatch(
        r"Self-conditioning on the 3 most probable tokens left out (\d+\.\d{4})% of the "
        rf"probability on average, and at most (\d+\.\d\d)% \({ROWS} predictions\)\.",
        line,
    )
    assert logged
    rounded = 100 * 2 * tolerances.softmax(V, LARGEST)
    for found, expected, digits in zip(
        logged.groups(), (left_out.mean(), left_out.max()), (4, 2), strict=True
    ):
        assert abs(float(found) - expected) <= 0.5 * 10**-digits + rounded


def test_memory_of_a_step(model: Model) -> None:
    for streams, extra in ((True, 0), (False, 100 * V * 12)):
        model.streams_vocabulary = streams
        assert most_step_bytes(model, torch.float32, rows=100, budget_bytes=MIB) == MIB + extra


@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (16, (16, 4 << 20)),
        (256, (256, 262_144)),  # one canvas, the whole vocabulary of the 26B model
        (300, (300, 218 << 10)),
        (1024, (1024, 65_536)),
        (4096, (4096, TILE_TOKENS)),
        (64 * 256, (4096, TILE_TOKENS)),
    ],
)
def test_tiles_of_fused_kernels_fill_the_budget(rows: int, tile: tuple[int, int]) -> None:
    budget = 256 * MIB
    assert tile_shape(rows, budget, fused_bytes=4) == tile
    assert math.prod(tile) * 4 <= budget
    assert tile_shape(rows, budget, fused_bytes=None) == (min(rows, 585), TILE_TOKENS)


def test_the_smallest_tile_may_take_more_than_the_budget() -> None:
    assert tile_shape(64, 1, fused_bytes=4) == tile_shape(64, 1, None) == (1, TILE_TOKENS)
    assert tile_shape(64, 1, None, on_cpu=True) == (1, CACHED_TILE[1])


def test_tiles_on_cpus_stay_in_caches() -> None:
    assert tile_shape(8192, 256 * MIB, None, on_cpu=True) == CACHED_TILE
    assert tile_shape(8192, 16 * MIB, None, on_cpu=True) == (128, CACHED_TILE[1])
