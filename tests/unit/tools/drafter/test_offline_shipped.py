"""The shipped target and drafter are what their cards say, on every eighth held-out prompt."""

import json

import pytest
from transformers import AutoTokenizer

from checkpoints.recipes.drafter.evaluate import summarize
from tests.paths import CHECKPOINTS
from vllm_dllm.tools.drafter.offline import replay
from vllm_dllm.tools.drafter.reference import load_drafter
from vllm_dllm.tools.drafter.sequences import complete, read_prompts
from vllm_dllm.tools.drafter.target_states import load_target

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

TARGET, DRAFTER = CHECKPOINTS / "qwen3-tiny-target", CHECKPOINTS / "qwen3-tiny-dflash"
EVERY = 8


@pytest.fixture(scope="module")
def summary() -> dict[str, dict[str, float]]:
    held_out = CHECKPOINTS / "held_out.jsonl"
    rows = [json.loads(line) for line in held_out.read_text().splitlines()][::EVERY]
    prompts = read_prompts(held_out, TARGET, room=1024)[::EVERY]
    target = load_target(TARGET, "cpu")
    answers = complete(target, prompts, max_tokens=128)
    texts = AutoTokenizer.from_pretrained(TARGET).batch_decode(answers, skip_special_tokens=True)
    return summarize(
        [row["task"] for row in rows],
        [text == row["answer"] for text, row in zip(texts, rows, strict=True)],
        replay(target, load_drafter(DRAFTER), prompts, answers, draft_width=15),
        verify_width=15,
    )


def test_target_answers_right(summary: dict[str, dict[str, float]]) -> None:
    assert summary["all"]["exact_match"] > 0.96


def test_blocks_of_16_emit_four_tokens_and_more(summary: dict[str, dict[str, float]]) -> None:
    taus = {task: line["tau"] for task, line in summary.items()}
    assert min(taus.values()) >= 4, taus
    assert taus["all"] >= 8


def test_evaluation_file_is_of_all_prompts() -> None:
    evaluation = json.loads((DRAFTER / "evaluation.json").read_text())
    assert evaluation["summary"]["all"]["rows"] == 506
    assert round(evaluation["summary"]["all"]["tau"], 2) == 9.30  # as its card says
