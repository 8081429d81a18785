"""`bench.drafter` refuses where answers differ, and its oracle is one."""

import pytest
from transformers import AutoTokenizer

from bench import harness, workload
from bench.drafter import ALONE, require_same_answers
from bench.drafter_oracle import best_widths
from tests.paths import CHECKPOINTS
from vllm_dllm.tools.drafter.reference import load_target
from vllm_dllm.tools.drafter.sequences import complete


def test_refuses_other_answers() -> None:
    require_same_answers({ALONE: [[1], [2]], "ours": [[1], [2]]})
    with pytest.raises(harness.Refused, match="ours answers 1 of 2 prompts differently"):
        require_same_answers({ALONE: [[1], [2]], "ours": [[1], [3]]})


def test_no_fixed_width_is_better_than_the_best_of_each_prompt() -> None:
    target, drafter = CHECKPOINTS / "qwen3-tiny-target", CHECKPOINTS / "qwen3-tiny-dflash"
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = workload.every_task(tokenizer, CHECKPOINTS / "held_out.jsonl").prompts[:12]
    answers = complete(load_target(target, "cpu"), prompts, 24)
    found = best_widths(target, drafter, prompts, answers, 15)
    assert len(found["tau_of_fixed"]) == 15
    assert found["tau"] >= max(found["tau_of_fixed"].values()) > 1
