"""`vllm-dllm drafter calibrate-width`: what is measured, learnt and reported, and what stops it.
Offline replay against speculative decoding done literally."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.recipes.drafter.evaluate import summarize
from checkpoints.recipes.tokenizer import EOS_ID
from tests import tolerances
from tests.paths import CHECKPOINTS
from vllm_dllm.cli import main
from vllm_dllm.drafters.blockpilot import HIDDEN_SIZES, PredictorConfig, load_predictor
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter import calibrate, measurements
from vllm_dllm.tools.drafter.calibrate import build_report, describe, train_predictor
from vllm_dllm.tools.drafter.measurements import (
    Measurements,
    Replayed,
    candidate_sizes,
    measure,
    measure_in_parts,
    replay,
    split_prompts,
)
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target
from vllm_dllm.tools.drafter.sequences import complete

pytestmark = pytest.mark.numerics

V, BLOCK_SIZE, MAX_TOKENS = 40, 8, 16
SIZES = (6, 7, 8)


def measured(tau: list[list[float]], logits: torch.Tensor | None = None) -> Measurements:
    """100 verifications a prompt and size."""
    emitted = torch.tensor([[round(100 * value) for value in row] for row in tau])
    if logits is None:
        logits = torch.zeros(len(tau), V)
    return Measurements(logits, emitted, torch.full_like(emitted, 100))


def learnable(rows: int, *, by_chance: bool = False) -> Measurements:
    """Which size is best shows in the best token and in its lead, or in nothing."""
    kinds = torch.arange(rows) % 3
    logits = torch.randn(rows, V)
    logits[torch.arange(rows), 3 * torch.randint(V // 3, (rows,)) + kinds] += 5.0 * (1 + kinds)
    if by_chance:
        kinds = torch.randint(3, (rows,))
    tau = [[3.0 + (i == kind) for i in range(3)] for kind in kinds.tolist()]
    return measured(tau, logits)


def test_labels_keep_the_best_fixed_size_unless_another_is_better() -> None:
    data = measured([[2.0, 3.0, 1.0], [3.0, 3.0, 3.0], [2.5, 2.5, 1.0], [1.0, 2.0, 4.0]])
    assert data.best_fixed == 1
    assert data.labels(data.best_fixed).tolist() == [1, 1, 1, 2]
    assert data.labels(2).tolist() == [1, 2, 0, 2]
    assert data.smallest_best.tolist() == [1, 0, 0, 2]


def test_candidate_sizes() -> None:
    assert candidate_sizes(16, 2) == (14, 15, 16)
    assert candidate_sizes(4, 5) == (2, 3, 4)


def test_no_prompt_is_on_both_sides() -> None:
    prompts = [[i % 50, 7] for i in range(80)]
    training, held_out = split_prompts(prompts, 0.25, seed=3)
    assert sorted(training + held_out) == [[i, 7] for i in range(50)]
    assert len(held_out) == 12
    assert split_prompts(prompts, 0.25, seed=3) == (training, held_out)
    assert split_prompts(prompts, 0.25, seed=4) != (training, held_out)
    with pytest.raises(InputError, match="got 5 different ones"):
        split_prompts(prompts[:5] * 9, 0.25, seed=3)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "full")) for name in HIDDEN_SIZES],
)
def test_learns_what_the_logits_tell(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "EPOCHS", 10)
    config = PredictorConfig(variant, V, SIZES, BLOCK_SIZE, HIDDEN_SIZES[variant])
    training, held_out = learnable(300), learnable(120)
    report = build_report(train_predictor(training, config, 0), training, held_out, 0)
    assert report["accuracy"] > 0.9 and report["better_than_best_fixed"]
    assert report["gain_over_best_fixed"] > 0.15
    assert report["oracle_over_best_fixed"] == pytest.approx(0.2)


def test_gains_nothing_where_there_is_nothing_to_learn() -> None:
    config = PredictorConfig("small", V, SIZES, BLOCK_SIZE, HIDDEN_SIZES["small"])
    training, held_out = learnable(300, by_chance=True), learnable(120, by_chance=True)
    report = build_report(train_predictor(training, config, 0), training, held_out, 0)
    assert not report["better_than_best_fixed"] and not report["looks_like_a_leak"]
    assert "not better than the best fixed block size" in describe(report)


class Fixed:
    """A predictor whose choices are given."""

    def __init__(self, chosen: list[int]):
        self.config = PredictorConfig("small", V, SIZES, BLOCK_SIZE, 8)
        self.chosen = chosen

    def predict_widths(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.chosen) - 1


def test_numbers_of_a_report() -> None:
    training = measured([[2.0, 3.0, 2.5]] * 5)
    held_out = Measurements(
        torch.zeros(2, V),
        torch.tensor([[10, 12, 12], [30, 30, 30]]),
        torch.tensor([[5, 4, 6], [10, 10, 6]]),
    )  # τ: 2, 3, 2 and 3, 3, 5
    report = build_report(Fixed([6, 8]), training, held_out, 0)  # type: ignore[arg-type]
    numbers = report["held_out"]
    assert numbers["best_fixed"] == {
        "tau": 3.0, "pooled_tau": 3.0, "verified_a_token": 6 * 14 / 42, "block_size": 7,
    }  # fmt: skip
    assert numbers["blockpilot"]["tau"] == 3.5 and numbers["oracle"]["tau"] == 4.0
    assert numbers["blockpilot"]["pooled_tau"] == pytest.approx(40 / 11)
    assert numbers["blockpilot"]["verified_a_token"] == pytest.approx((5 * 5 + 7 * 6) / 40)
    assert report["gain_over_best_fixed"] == pytest.approx(1 / 6)
    assert report["share_of_oracle"] == pytest.approx(0.5)
    assert report["accuracy"] == 0.5 and report["prompts"] == [5, 2]


def test_a_result_at_the_oracle_is_called_a_leak() -> None:
    data = measured([[3.0, 2.0, 2.0], [2.0, 2.0, 3.0]] * 30)
    report = build_report(Fixed([6, 8] * 30), data, data, 0)  # type: ignore[arg-type]
    assert report["looks_like_a_leak"] and "too good" in describe(report)
    same = measured([[3.0, 3.0, 3.0]] * 60)  # the oracle gains nothing: there is nothing to leak
    report = build_report(Fixed([6] * 60), same, same, 0)  # type: ignore[arg-type]
    assert not report["looks_like_a_leak"]


def test_measures_what_decoding_would_do(
    target: Target, half_trained: DFlashDrafter, prompts: list[list[int]]
) -> None:
    prompts = prompts[:6]
    found = measure(target, half_trained, prompts, SIZES, MAX_TOKENS)
    answers = complete(target, prompts, MAX_TOKENS)
    for i, size in enumerate(SIZES):
        replayed = replay(target, half_trained, prompts, answers, size - 1)
        right = [course for course in replayed if len(course.answer) > 1]
        lengths = [course.emitted_lengths(size - 1) for course in right]
        assert found.emitted[:, i].tolist() == [sum(one) for one in lengths]
        assert found.verifications[:, i].tolist() == [len(one) for one in lengths]
        assert torch.equal(found.logits, torch.stack([course.first_logits for course in right]))
    assert found.emitted.sum() > found.verifications.sum()  # something was accepted


@pytest.fixture
def command(
    target_folder: Path, half_trained_folder: Path, tmp_path: Path
) -> Callable[..., tuple[int, Path]]:
    """Runs the command; returns the exit status and OUT."""
    prompts, words = tmp_path / "prompts.jsonl", ["river", "stone", "lamp", "bread", "cloud"]
    rng = random.Random(1)
    rows = [{"prompt": " ".join(rng.choices(words, k=5))} for _ in range(80)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "predictor"

    def run(*options: object, **changes: object) -> tuple[int, Path]:
        arguments = {"--target": target_folder, "--drafter": half_trained_folder}
        arguments |= {"--prompts": prompts, "-o": out, "--max-tokens": MAX_TOKENS}
        arguments |= {f"--{name}": value for name, value in changes.items()}
        named = [str(word) for item in arguments.items() for word in item]
        return main(["drafter", "calibrate-width", *named, *map(str, options)]), out

    return run


def test_from_end_to_end(
    command: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = command()
    assert status == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json", "model.safetensors", "report.json", "report.png",
    ]  # fmt: skip
    assert not out.with_name("predictor.partial").exists()
    report = json.loads((out / "report.json").read_text())
    assert report["held_out"]["oracle"]["tau"] >= report["held_out"]["blockpilot"]["tau"] >= 1
    assert list(report["held_out_fixed"]) == ["6", "7", "8"]
    printed = capsys.readouterr().out
    assert f"block size {report['held_out']['best_fixed']['block_size']} for all" in printed
    vocab_size = json.loads((out / "config.json").read_text())["vocab_size"]
    predictor = load_predictor(out, vocab_size=vocab_size, trained_block_size=BLOCK_SIZE)
    assert set(predictor.predict_widths(torch.randn(5, vocab_size)).tolist()) <= {5, 6, 7}


class Interruption(Exception):
    pass


def test_goes_on_where_it_was_interrupted(
    command: Callable[..., tuple[int, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def measure_twice(*args: Any, **options: Any) -> Measurements:
        calls.append(len(args[2]))
        if len(calls) == 2:
            raise Interruption
        return measure(*args, **options)

    monkeypatch.setattr(measurements, "measure", measure_twice)
    with pytest.raises(Interruption):
        command()
    status, out = command()
    first, interrupted, *rest = calls
    assert status == 0 and interrupted == rest[0]
    num_prompts = sum(json.loads((out / "report.json").read_text())["prompts"])
    assert first + sum(rest) == num_prompts  # none twice
    status, _ = command()
    assert status == 1  # OUT is there


def test_parts_are_read_back_whole(tmp_path: Path) -> None:
    prompts, done = [[7] * (1 + i % 9) for i in range(70)], []

    def fake(part: list[list[int]]) -> Measurements:
        return measured([[float(len(prompt))] * 3 for prompt in part], torch.randn(len(part), V))

    def refuse(part: list[list[int]]) -> Measurements:
        raise AssertionError("this part was measured before")

    one = measure_in_parts(fake, prompts, tmp_path, done.append)
    (tmp_path / "part-00002.tmp").write_bytes(b"torn")
    two = measure_in_parts(refuse, prompts, tmp_path, done.append)
    assert done == [32, 32, 6] * 2 and len(one) == 70
    for field, tensor in vars(one).items():
        assert torch.equal(tensor, getattr(two, field))
    assert one.tau[:, 0].tolist() == [len(prompt) for prompt in prompts]


WRONG = {
    "no target": ({"target": "nowhere"}, (), "does not exist: expected the folder of a checkpoint"),
    "no drafter": ({"drafter": "nowhere"}, (), "nowhere/config.json does not exist"),
    "no prompts": ({"prompts": "nowhere"}, (), "cannot read the prompts"),
    "radius": ({}, ("--radius", 0), "--radius must be at least 1, got 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(
    command: Callable[..., tuple[int, Path]], case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, options, message = WRONG[case]
    status, out = command(*options, **changes)
    error = capsys.readouterr().err
    assert status == 1 and not out.exists() and not out.with_name("predictor.partial").exists()
    assert message in error and error.count("\n") == 1


MAX_ANSWER = 24


@torch.no_grad()
def literal(
    target: Target,
    drafter: DFlashDrafter,
    prompt: list[int],
    draft_width: int,
    verify_width: int,
    max_tokens: int,
) -> tuple[list[int], list[int]]:
    """(answer, tokens emitted by each verification) without any cache."""

    def best_guesses(tokens: list[int]) -> list[int]:
        return target.model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()

    tokens = [*prompt, best_guesses(prompt)[-1]]
    lengths = []
    while tokens[-1] != EOS_ID and len(tokens) < len(prompt) + max_tokens:
        known = len(tokens) - 1  # the anchor, sampled last, has no state yet
        states, _ = target.states(torch.tensor([tokens[:known]]), drafter.target_layer_ids)
        context = drafter.context_kv(states, torch.arange(known)[None])
        block = torch.tensor([[tokens[-1]] + [drafter.mask_token_id] * draft_width])
        positions = known + torch.arange(draft_width + 1)[None]
        hidden = drafter(target.embed(block), positions, context)
        drafted = target.logits(hidden)[0, 1:].argmax(-1).tolist()[:verify_width]
        verified = best_guesses(tokens + drafted)[known:]
        emitted = []
        for token, guess in zip(verified, [*drafted, None], strict=True):
            emitted.append(token)
            if token != guess or token == EOS_ID:
                break
        emitted = emitted[: len(prompt) + max_tokens - len(tokens)]
        tokens += emitted
        lengths.append(len(emitted))
    return tokens[len(prompt) :], lengths


@pytest.mark.parametrize(
    ("draft_width", "verify_width"),
    [
        pytest.param(7, 7, id="whole block"),
        pytest.param(7, 3, id="fewer verified"),
        pytest.param(4, 4, id="narrow block", marks=pytest.mark.slow),
        pytest.param(1, 1, id="one token", marks=pytest.mark.slow),
    ],
)
def test_equals_literal_speculative_decoding(
    target: Target,
    half_trained: DFlashDrafter,
    prompts: list[list[int]],
    draft_width: int,
    verify_width: int,
) -> None:
    answers = complete(target, prompts[:6], MAX_ANSWER)
    replayed = replay(target, half_trained, prompts[:6], answers, draft_width)
    emitted: list[int] = []
    for prompt, found in zip(prompts, replayed, strict=False):
        lengths = found.emitted_lengths(verify_width)
        expected = literal(target, half_trained, prompt, draft_width, verify_width, MAX_ANSWER)
        assert (found.answer, lengths) == expected
        first = target.model(torch.tensor([prompt])).logits[0, -1]
        allowed = tolerances.model(layers=4, width=64, logits=2.0)
        torch.testing.assert_close(found.first_logits, first, atol=allowed, rtol=0)
        emitted += lengths
    assert min(emitted) == 1 or verify_width == 1, "some drafts fail"
    assert max(emitted) == verify_width + 1, "some drafts are right to the end"


def test_an_answer_of_one_token_needs_no_verification(
    target: Target, half_trained: DFlashDrafter, prompts: list[list[int]]
) -> None:
    one, other = replay(
        target, half_trained, prompts[:2], [[EOS_ID], [9, 9, EOS_ID]], draft_width=3
    )
    assert one.emitted_lengths(3) == []
    assert sum(other.emitted_lengths(3)) == 2


def test_refuses_a_drafter_for_another_target(
    target: Target, half_trained: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_trained.config, "num_target_layers", 9)
    with pytest.raises(InputError, match="target layers: 9 in the drafter, 4 in the target"):
        replay(target, half_trained, [[5, 6]], [[7, 8]], 3)


def test_summary_by_task() -> None:
    replayed = [
        Replayed([7, 8, 9, EOS_ID], torch.zeros(1), matches=[3, 0, 0]),
        Replayed([7, 8, EOS_ID], torch.zeros(1), matches=[0, 0]),
        Replayed([7, EOS_ID], torch.zeros(1), matches=[0]),
    ]
    assert summarize(["sort", "add", "add"], [True, False, True], replayed, verify_width=15) == {
        "sort": {"rows": 1, "exact_match": 1.0, "tokens": 4.0, "tau": 3.0},
        "add": {"rows": 2, "exact_match": 0.5, "tokens": 2.5, "tau": 1.0},
        "all": {"rows": 3, "exact_match": 2 / 3, "tokens": 3.0, "tau": 1.5},
    }


def test_the_shipped_drafter_is_as_good_as_its_card_says() -> None:
    """How it drafts in a server: `tests/engine/test_drafters.py::test_acceptance_length`."""
    folder = CHECKPOINTS / "qwen3-tiny-dflash"
    found = json.loads((folder / "evaluation.json").read_text())["summary"]["all"]
    assert found["rows"] == 506 and f"{found['tau']:.2f}" in (folder / "README.md").read_text()
