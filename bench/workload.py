"""What is asked of the measured systems: prompts with known answers, short ones and long ones."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness
from checkpoints.recipes import tasks

SHORT_TOKENS = 20
LONG_TOKENS = 128


@dataclass(frozen=True)
class Workload:
    tokenizer: Any
    prompts: list[list[int]]
    answers: list[str]
    max_tokens: int

    @classmethod
    def build(
        cls, tokenizer: Any, messages: Sequence[Any], answers: list[str], max_tokens: int
    ) -> "Workload":
        prompts = [
            tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
            for m in messages
        ]
        return cls(tokenizer, prompts, answers, max_tokens)

    def accuracy(self, outputs: list[list[int]]) -> float:
        """Exact match of answers to the first prompts."""
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return harness.exact_match(texts, self.answers[: len(outputs)])


def num_tokens(tokenizer: Any, answer: str) -> int:
    """Tokens of an answer and the one that ends it."""
    return len(tokenizer(answer, add_special_tokens=False).input_ids) + 1


def every_task(tokenizer: Any, held_out: Path, max_tokens: int = LONG_TOKENS) -> Workload:
    """Held-out prompts whose answers fit `max_tokens`, the tasks taking turns."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for line in held_out.read_text().splitlines():
        row = json.loads(line)
        if num_tokens(tokenizer, row["answer"]) <= max_tokens:
            by_task.setdefault(row["task"], []).append(row)
    longest = max(map(len, by_task.values()))
    turns = [[rows[i] for rows in by_task.values() if i < len(rows)] for i in range(longest)]
    rows = [row for turn in turns for row in turn]
    return Workload.build(
        tokenizer, [row["messages"] for row in rows], [row["answer"] for row in rows], max_tokens
    )


def short(tokenizer: Any, held_out: Path) -> Workload:
    return every_task(tokenizer, held_out, SHORT_TOKENS)


def long(tokenizer: Any, canvas_length: int, count: int = 128) -> Workload:
    """Counting, the task whose answers need a second canvas; prompts come more than once."""
    rng = random.Random(0)
    found = [tasks.generate(rng, "count_up", held_out=False) for _ in range(20 * count)]
    chosen = [
        example for example in found if num_tokens(tokenizer, example.answer) > canvas_length
    ][:count]
    return Workload.build(
        tokenizer,
        [example.messages() for example in chosen],
        [example.answer for example in chosen],
        LONG_TOKENS,
    )
