"""Whole generations equal transformers' own `generate` fed with the same noise.

Best guess, accepted positions, next canvas, the step a block stops at and the committed tokens are
compared at every step, for prompts that are decoded together in one batch by a compiled engine.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm import SamplingParams

from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import HELD_OUT, TRAINED, Engine, GetEngine, chat_tokens
from tests.engine.one_step import Prompt
from tests.engine.parting import Decisions, Settings, first_parting, is_decided_by_rounding
from tests.engine.rounding import noisy_model

pytestmark = pytest.mark.numerics


# What a machine without a C++ compiler gets.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


def served_trajectories(
    engine: Engine, prompts: Sequence[Prompt], max_new_tokens: list[int], **xargs: int
) -> list[reference.Trajectory]:
    """Decodes all prompts in one go, the i-th with seed i; reads the steps from the trace."""
    engine.trace.write_text("")
    params = [
        SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, seed=seed, logprobs=0, extra_args=xargs
        )
        for seed, max_tokens in enumerate(max_new_tokens)
    ]
    trajectories = []
    for output in engine.ask(prompts, params):
        completion = output.outputs[0]
        trajectory = reference.Trajectory(tokens=list(completion.token_ids))
        trajectory.logprobs = [
            scores[token].logprob
            for token, scores in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        for line in engine.steps(output.request_id):
            if line["step"] == 1:
                trajectory.block_lengths.append(0)
            trajectory.block_lengths[-1] += 1
            trajectory.steps.append((line["tokens"], line["accepted"], line["canvas"]))
        trajectories.append(trajectory)
    return trajectories


def parted(
    model: Any,
    ours: reference.Trajectory,
    expected: reference.Trajectory,
    again: Callable[[], reference.Trajectory] | None = None,  # the reference's, once more
) -> bool:
    """Whether rounding parted the two. To there, or to the end, they are the same.

    Where two experts are equally good but for the last digits, rounding decides which one a row
    goes to, and the row's logits move by far more than rounding does. `again` tells: with noise in
    the weights, the reference then goes our way.
    """
    for end in itertools.accumulate(ours.block_lengths):
        best_guess, _, canvas = ours.steps[end - 1]
        assert canvas == best_guess, "a finished block's canvas is what is committed"
    config = model.generation_config
    settings = Settings(
        config.sampler_config.entropy_bound, config.confidence_threshold, config.t_min
    )
    one, other = ours.decisions(), expected.decisions()
    step = first_parting(one, other)
    if step is not None:
        is_close = is_decided_by_rounding(one[step], other[step], expected.grounds[step], settings)
        assert is_close or (again and noise_parts(model, one[: step + 1], again)), f"step {step}"
        return True
    assert ours.tokens == expected.tokens
    allowed = tolerances.LOGPROB / config.t_min
    off = [abs(one - other) for one, other in zip(ours.logprobs, expected.logprobs, strict=True)]
    if max(off) > allowed:
        assert again, f"log-probabilities are off by up to {max(off)}, allowed {allowed}"
        moved = moved_by_noise(model, expected, again)
        assert all(one <= allowed + by for one, by in zip(off, moved, strict=True)), (off, moved)
    return False


def moved_by_noise(
    model: Any, expected: reference.Trajectory, again: Callable[[], reference.Trajectory]
) -> list[float]:
    """By how much noise of the size of rounding errors moves the reference's log-probabilities, one
    by one, where it decides the same. A second step reads what rounding made of the first."""
    moved = [0.0] * len(expected.logprobs)
    for seed in range(tolerances.NOISES_OF_LOGPROBS):
        with noisy_model(model, seed):
            noisy = again()
        if noisy.tokens == expected.tokens:
            pairs = zip(noisy.logprobs, expected.logprobs, strict=True)
            by = [abs(one - other) for one, other in pairs]
            moved = list(map(max, moved, by))
    return moved


def noise_parts(
    model: Any, ours: Sequence[Decisions], again: Callable[[], reference.Trajectory]
) -> bool:
    """Whether noise of the size of rounding errors makes the reference decide as we do."""
    for seed in range(tolerances.NOISES_AT_A_TIE):
        with noisy_model(model, seed):
            if again().decisions()[: len(ours)] == list(ours):
                return True
    return False


@pytest.mark.parametrize(
    ("num_blocks", "every"), [(25, 18), (50, 9), pytest.param(200, 2, marks=pytest.mark.thorough)]
)
def test_trained_checkpoint(engine: GetEngine, num_blocks: int, every: int) -> None:
    """At least so many converge on their own, some of them the second of their answer. Compiling
    takes longer than the few."""
    served = engine(TRAINED, enforce_eager=num_blocks < 50)
    model = reference.load(TRAINED)
    tokenizer = served.llm.get_tokenizer()
    canvas_length = model.config.canvas_length
    rows = HELD_OUT[::every]
    prompts = [chat_tokens(tokenizer, row["messages"]) for row in rows]
    # Whole canvases, up to the one that ends the answer.
    lengths = [
        canvas_length * (1 + len(tokenizer.encode(row["answer"])) // canvas_length) for row in rows
    ]
    assert max(lengths) > canvas_length and sum(lengths) >= num_blocks * canvas_length
    trajectories = served_trajectories(served, prompts, lengths)
    num_parted = 0
    for seed, (prompt, length, trajectory) in enumerate(
        zip(prompts, lengths, trajectories, strict=True)
    ):
        expected = reference.generate_with_noise(model, prompt, seed, length)
        num_parted += parted(model, trajectory, expected)
        assert expected.block_lengths[0] < 48
    assert num_parted <= tolerances.PARTED * len(prompts)
