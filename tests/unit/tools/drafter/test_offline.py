"""Offline replay against speculative decoding done literally, one prompt and step at a time."""

import json

import pytest
import torch

from checkpoints.recipes.drafter.evaluate import summarize
from checkpoints.recipes.tokenizer import EOS_ID
from tests import tolerances
from tests.paths import CHECKPOINTS
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter.measurements import Replayed, replay
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target
from vllm_dllm.tools.drafter.sequences import complete

pytestmark = pytest.mark.numerics

MAX_TOKENS = 24


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
    answers = complete(target, prompts[:6], MAX_TOKENS)
    replayed = replay(target, half_trained, prompts[:6], answers, draft_width)
    emitted: list[int] = []
    for prompt, found in zip(prompts, replayed, strict=False):
        lengths = found.emitted_lengths(verify_width)
        expected = literal(target, half_trained, prompt, draft_width, verify_width, MAX_TOKENS)
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
