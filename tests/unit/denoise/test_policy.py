"""The denoising policy against transformers' own sampler, schedule and stopping rule."""

import math
from typing import Any

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from tests import tolerances
from vllm_dllm.denoise.row_stats import RowStats, row_stats, sample_by_inversion
from vllm_dllm.denoise.rules import (
    AT_REST,
    NO_TOKEN,
    Reveal,
    accept_by_entropy_bound,
    accept_forced_positions,
    is_confident,
    times_repeated,
    up_to_first_stop,
)
from vllm_dllm.denoise.step import (
    AnswerOnly,
    CanvasState,
    LegalPaths,
    StepRules,
    denoise_step,
    temperature,
)

pytestmark = pytest.mark.numerics

N, C, V = 5, 16, 40


EXCLUDED = -1e20
LOGPROBS = [math.log(p) for p in (0.5, 0.9, 0.7)]


def random_logits(seed: int, sharpness: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sharpness * torch.randn(N, C, V, generator=generator)


def stats_of(logits: torch.Tensor, uniform: torch.Tensor) -> RowStats:
    return row_stats(logits, uniform)[0]


def guessing(best: list[int], entropy_nats: list[float], n: int = 1, **others: Any) -> RowStats:
    """Of `n` canvases alike, whose candidates are the best guesses and sure, if nothing else is
    said."""
    found = {"best_guess": best, "candidate": best, "entropy_nats": entropy_nats}
    found |= {"best_logprob": [0.0] * len(best), **others}
    return RowStats(**{name: torch.tensor([row] * n) for name, row in found.items()})


@pytest.mark.parametrize("num_steps", [1, 16, 48])
def test_temperature_is_the_reference_schedule(num_steps: int) -> None:
    reference = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, num_steps)
    logits = random_logits(0)
    for steps_done in range(num_steps):
        remaining = torch.tensor(num_steps - steps_done, dtype=torch.int32)
        ours = temperature(torch.tensor([steps_done]), torch.tensor([num_steps]), 0.4, 0.8 - 0.4)
        assert torch.equal(logits / ours, reference(None, logits, cur_step=remaining))


@pytest.mark.parametrize("bound", [1e-6, 0.1, 1.0, 50.0])
@pytest.mark.parametrize("sharpness", [0.5, 4.0, 30.0])
def test_acceptance_is_the_reference(bound: float, sharpness: float) -> None:
    reference = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), C, V, 48)
    logits = random_logits(1, sharpness)
    canvas = torch.zeros(N, C, dtype=torch.long)
    reference.accept_canvas(canvas, canvas, logits, 1)
    stats = stats_of(logits.view(-1, V), torch.full((N * C,), 0.5))
    accepted = accept_by_entropy_bound(stats.entropy_nats.view(N, C), bound)
    assert torch.equal(accepted, reference.accepted_token_mask)
    assert accepted.any(dim=-1).all(), "at least one position is always accepted"


def test_absent_positions_are_never_accepted_and_do_not_use_up_the_bound() -> None:
    entropy = torch.tensor([[0.05, torch.inf, 0.02, torch.inf, 0.04, 0.3]])
    present = torch.tensor([0, 2, 4, 5])
    accepted = accept_by_entropy_bound(entropy, 0.1)
    assert accepted.tolist() == [[True, False, True, False, True, False]]
    assert torch.equal(accepted[:, present], accept_by_entropy_bound(entropy[:, present], 0.1))


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_convergence_is_the_reference(stability: int) -> None:
    confidence = 0.05
    reference = StableAndConfidentStoppingCriteria(stability, confidence)
    earlier, times = torch.full((N, C), NO_TOKEN), torch.zeros(N, dtype=torch.long)
    valid = torch.ones(N, C, dtype=torch.bool)
    base = random_logits(2)
    outcomes = []
    for step in range(6):
        logits = base * (1.0 + 2.0 * step)
        logits[step % N, 0, step] += 1e4 * (step < 3)  # one canvas a step changes its mind
        stats = stats_of(logits.view(-1, V), torch.zeros(N * C))
        best_guess, entropy = stats.best_guess.view(N, C), stats.entropy_nats.view(N, C)
        times = times_repeated(best_guess, earlier, times, valid)
        ours = (times >= stability) & is_confident(entropy, valid, confidence)
        earlier = best_guess
        assert torch.equal(ours, reference(best_guess, logits))
        outcomes.append(ours)
    assert torch.stack(outcomes).any(), "the case must contain a convergence"
    assert not torch.stack(outcomes).all()


def test_candidates_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125])
    draws = 40_000
    uniform = (torch.arange(draws) + 0.5) / draws
    stats = stats_of(probs.log().clamp(min=EXCLUDED).expand(draws, -1), uniform)
    counts = torch.bincount(stats.candidate, minlength=5) / draws
    # Draws are evenly spaced: at either end of a token's interval one may fall on the other side.
    assert (counts - probs).abs().max() <= 2 / draws
    entropy = torch.distributions.Categorical(probs.double()).entropy()
    allowed = tolerances.entropy(terms=5, largest_logit=2.1, spread=1.4)
    assert (stats.entropy_nats[0] - entropy).abs() <= allowed


def test_a_row_alone_is_summed_as_one_of_several_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's sum of a single row there joins partial sums in another order, which may grow at a
    token of probability 0: a grammar would be given one that it has excluded."""
    probs = torch.rand(3, 512, generator=torch.Generator().manual_seed(0)).softmax(-1)
    uniform = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    expected, stock, summed = sample_by_inversion(probs, uniform), torch.Tensor.cumsum, []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda *a, **k: summed.append(a[0].shape) or stock(*a, **k)
    )
    assert torch.equal(sample_by_inversion(probs, uniform), expected)
    assert torch.equal(sample_by_inversion(probs[1:2], uniform[1:2]), expected[1:2])
    assert summed == [(3, 512), (2, 512)]


def reveal_rule(threshold: float, per_step: int, revealed: torch.Tensor, n: int = 1) -> Reveal:
    return Reveal(
        is_chosen=torch.ones(n, dtype=torch.bool),
        threshold=torch.full((n,), threshold),
        per_step=torch.full((n,), per_step),
        revealed=revealed,
        tokens=torch.full_like(revealed, 50, dtype=torch.long),
    )


def test_judging_the_answer_only() -> None:
    guess = torch.tensor([[5, 9, 7, 9], [5, 6, 7, 8], [9, 6, 7, 8]])
    stops = torch.tensor([[9, -1]] * 3)
    answer = up_to_first_stop(guess, None, stops)
    assert answer.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    valid = torch.tensor([[True, False, True, True], [True, True, True, False], [True] * 4])
    answer = up_to_first_stop(guess, valid, stops)
    assert answer.int().tolist() == [[1, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]


def not_repeated(
    best_guess: torch.Tensor,  # [n, C] int64
    steps_done: int = 0,
    num_steps: int = 48,
) -> CanvasState:
    zeros = torch.zeros(len(best_guess), dtype=torch.long)
    return CanvasState(best_guess, zeros, zeros + steps_done, zeros + num_steps)


def test_an_answer_is_finished_with_its_whole_canvas() -> None:
    """As without `AnswerOnly`, where the mean over the answer alone is above the threshold."""
    stats = guessing([5, 9, 7, 8], [0.008, 0.008, 0.0, 0.0])
    rules, chosen = StepRules(0.1, 0.005, 1), AnswerOnly(torch.tensor([True]), torch.tensor([[9]]))
    noise = torch.zeros(1, 4).long()
    for guess, is_finished in ([5, 9, 7, 8], True), ([5, 9, 1, 2], True), ([5, 1, 7, 8], False):
        state = not_repeated(torch.tensor([guess]), steps_done=1)
        outcome = denoise_step(stats, None, state, noise, rules, None, chosen)
        assert outcome.finished.tolist() == [is_finished]


def test_what_is_forced_is_accepted_with_the_last_choice_before_it() -> None:
    accepted = torch.tensor([[False, False, True, False, False, False]])
    forced = torch.tensor([[True, False, False, True, True, False]])
    followed = accept_forced_positions(accepted, forced)
    assert followed.int().tolist() == [[1, 0, 1, 1, 1, 0]]
    assert accept_forced_positions(torch.zeros(1, 3).bool(), torch.ones(1, 3).bool()).all()


def test_what_is_forced_is_no_sign_of_certainty() -> None:
    stats = guessing([1, 2, 3, 4], [0.05, 2.0, 0.0, 0.06], 2)
    state = not_repeated(torch.full((2, 4), NO_TOKEN))
    forced = torch.tensor([[False, False, True, False], [False] * 4])
    constrained = LegalPaths(torch.tensor([True, False]), forced, torch.zeros(2, 4).bool())
    noise, rules = torch.full((2, 4), 77), StepRules(0.1, 0.005, 1)
    outcome = denoise_step(stats, None, state, noise, rules, constrained=constrained)
    # 0.05 and 0.06 nats are before position 1's 2.0: too many. The forced one goes with it.
    assert outcome.canvas.tolist() == [[1, 77, 77, 4], [1, 77, 3, 4]]


def test_what_follows_the_end_is_as_good_as_decided() -> None:
    """0.01 nats in one position of four are few enough, as where the model has decided the end."""
    best = torch.tensor([[5, 9, 3, 3], [5, 9, 3, 3]])
    stats = RowStats(best, best, torch.tensor([[0.01, 0.0, 0.9, 0.9]] * 2), torch.zeros(2, 4))
    state = not_repeated(torch.tensor([[5, 9, 4, 4]] * 2), steps_done=1)
    free = torch.tensor([[False, False, True, True], [False] * 4])
    constrained = LegalPaths(torch.tensor([True, False]), torch.zeros(2, 4).bool(), free)
    rules = StepRules(0.1, 0.005, 1)
    outcome = denoise_step(stats, None, state, best, rules, constrained=constrained)
    assert outcome.finished.tolist() == [True, False]
    assert outcome.state.times_repeated.tolist() == [1, 0]


def test_a_canvas_with_a_grammar_comes_to_rest() -> None:
    """Whether the model is sure or not; one without a grammar does not, nor one that is revealed
    permanently, nor one that is to stand still for longer."""
    best = torch.tensor([[5, 9, 3, 3]] * 4)
    stats = RowStats(best, best, torch.full((4, 4), 0.9), torch.zeros(4, 4))
    nowhere = torch.zeros(4, 4).bool()
    constrained = LegalPaths(torch.tensor([True, False, True, True]), nowhere, nowhere)
    rules = StepRules(0.1, 0.005, torch.tensor([1, 1, 1, AT_REST + 2]))
    rule = reveal_rule(2.0, 1, nowhere, n=4)
    rule = rule._replace(is_chosen=torch.tensor([False, False, True, False]))
    state = not_repeated(torch.full((4, 4), NO_TOKEN))
    finished = []
    for _ in range(AT_REST + 3):
        outcome = denoise_step(stats, None, state, best, rules, rule, constrained=constrained)
        state = outcome.state
        finished.append(outcome.finished.tolist())
    assert finished[AT_REST - 1] == [False] * 4
    assert finished[AT_REST] == finished[AT_REST + 1] == [True, False, False, False]
    assert finished[AT_REST + 2] == [True, False, False, True]


def test_a_revealed_token_that_a_grammar_rejects_is_hidden_again() -> None:
    stats = guessing([50, 8, 3], [1.0] * 3, 2, candidate=[4, 5, 6], best_logprob=LOGPROBS)
    state = not_repeated(torch.full((2, 3), NO_TOKEN), num_steps=9)
    revealed = torch.tensor([[True, True, False]] * 2)  # all 50
    nowhere = torch.zeros(2, 3).bool()
    constrained = LegalPaths(torch.tensor([True, False]), nowhere, nowhere)
    rule = reveal_rule(2.0, 1, revealed, n=2)
    noise, rules = torch.full((2, 3), 77), StepRules(0.1, 0.005, 1)
    outcome = denoise_step(stats, None, state, noise, rules, rule, constrained=constrained)
    assert outcome.state.best_guess.tolist() == [[50, 8, 3], [50, 50, 3]]
    assert outcome.accepted.tolist() == [[True, False, True], [True, True, True]]
    assert outcome.finished.tolist() == [False, True]


def test_a_row_of_nan_points_into_the_vocabulary() -> None:
    logits = torch.full((2, V), torch.nan)
    logits[1] = torch.inf
    stats = stats_of(logits, torch.tensor([0.5, 0.5]))
    for tokens in (stats.best_guess, stats.candidate):
        assert ((tokens >= 0) & (tokens < V)).all()
