"""The denoising policy against transformers' own sampler, schedule and stopping rule."""

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from vllm_dllm.config import DenoiseConfig
from vllm_dllm.denoise.acceptance import accept_by_entropy_bound
from vllm_dllm.denoise.convergence import NO_TOKEN, is_confident, is_stable, push_history
from vllm_dllm.denoise.row_stats import RowStats, row_stats
from vllm_dllm.denoise.schedule import temperature
from vllm_dllm.denoise.step import CanvasState, denoise_step

N, C, V = 5, 16, 40


EXCLUDED = -1e20


def random_logits(seed: int, sharpness: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sharpness * torch.randn(N, C, V, generator=generator)


def stats_of(logits: torch.Tensor, uniform: torch.Tensor) -> RowStats:
    return row_stats(logits, uniform)[0]


@pytest.mark.parametrize("num_steps", [1, 16, 48])
def test_temperature_is_the_reference_schedule(num_steps: int) -> None:
    reference = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, num_steps)
    logits = random_logits(0)
    for steps_done in range(num_steps):
        remaining = torch.tensor(num_steps - steps_done, dtype=torch.int32)
        ours = temperature(torch.tensor([steps_done]), torch.tensor([num_steps]), 0.4, 0.8)
        assert torch.equal(logits / ours, reference(None, logits, cur_step=remaining))


def test_capped_schedule_ends_where_the_reference_with_that_many_steps_ends() -> None:
    # Stock vLLM keeps the schedule of 48 steps, and ends a cap of 16 at 0.675.
    last = temperature(torch.tensor([15]), torch.tensor([16]), 0.4, 0.8)
    assert last.item() == pytest.approx(0.425)


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
    history = torch.full((N, stability, C), NO_TOKEN)
    valid = torch.ones(N, C, dtype=torch.bool)
    base = random_logits(2)
    outcomes = []
    for step in range(6):
        logits = base * (1.0 + 2.0 * step)
        logits[step % N, 0, step] += 1e4 * (step < 3)  # one canvas a step changes its mind
        stats = stats_of(logits.view(-1, V), torch.zeros(N * C))
        best_guess, entropy = stats.best_guess.view(N, C), stats.entropy_nats.view(N, C)
        ours = is_stable(best_guess, history, valid) & is_confident(entropy, valid, confidence)
        history = push_history(history, best_guess)
        assert torch.equal(ours, reference(best_guess, logits))
        outcomes.append(ours)
    assert torch.stack(outcomes).any(), "the case must contain a convergence"
    assert not torch.stack(outcomes).all()


def test_phantom_positions_do_not_keep_a_canvas_from_converging() -> None:
    entropy = torch.tensor([[0.001, 0.002, 5.0, 5.0]])
    valid = torch.tensor([[True, True, False, False]])
    guess = torch.tensor([[3, 4, 0, 0]])
    history = torch.tensor([[[3, 4, 7, 7]]])
    assert is_confident(entropy, valid, 0.005).item()
    assert is_stable(guess, history, valid).item()
    assert not is_confident(entropy, torch.ones_like(valid), 0.005).item()


def test_candidates_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125])
    draws = 40_000
    uniform = (torch.arange(draws) + 0.5) / draws
    stats = stats_of(probs.log().clamp(min=EXCLUDED).expand(draws, -1), uniform)
    counts = torch.bincount(stats.candidate, minlength=5) / draws
    assert torch.allclose(counts, probs, atol=1e-4)
    entropy = torch.distributions.Categorical(probs).entropy()
    assert torch.allclose(stats.entropy_nats[0], entropy)


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2**-53])
def test_excluded_tokens_are_never_candidates(edge: float) -> None:
    logits = torch.full((1, 7), EXCLUDED)
    logits[0, [2, 4]] = torch.tensor([1.0, 3.0])
    uniform = torch.tensor([edge], dtype=torch.float64)
    assert stats_of(logits, uniform).candidate.item() in (2, 4)
    assert torch.isfinite(stats_of(logits, uniform).entropy_nats).all()


def test_step_replaces_what_it_does_not_accept_and_stops_at_the_cap() -> None:
    config = DenoiseConfig(48, 0.4, 0.8, 0.1, 0.005, 1)
    stats = RowStats(
        best_guess=torch.tensor([[1, 2, 3]] * 2),
        candidate=torch.tensor([[1, 9, 3]] * 2),
        entropy_nats=torch.tensor([[0.0, 2.0, 0.09]] * 2),
    )
    state = CanvasState(
        history=torch.full((2, 1, 3), NO_TOKEN),
        steps_done=torch.tensor([0, 3], dtype=torch.int32),
        num_steps=torch.tensor([4, 4], dtype=torch.int32),
    )
    noise = torch.full((2, 3), 77)
    outcome = denoise_step(stats, torch.ones(2, 3, dtype=torch.bool), state, noise, config)
    # The exclusive sum: position 1 (2.0 nats) comes after 0.09 nats and is accepted, too.
    assert outcome.accepted.tolist() == [[True, True, True]] * 2
    assert outcome.finished.tolist() == [False, True]
    sharper = stats._replace(entropy_nats=torch.tensor([[0.0, 2.0, 0.11]] * 2))
    outcome = denoise_step(sharper, torch.ones(2, 3, dtype=torch.bool), state, noise, config)
    assert outcome.canvas.tolist() == [[1, 77, 3]] * 2
    assert outcome.state.history.tolist() == [[[1, 2, 3]]] * 2
