"""Answers are right by other means, and training never sees a held-out prompt."""

import json
import random
import re

import pytest

from checkpoints.recipes.exact_match import read_rows
from checkpoints.recipes.tasks import TASKS, generate, held_out_examples
from checkpoints.recipes.words import CAPITALS
from tests.paths import CHECKPOINTS

HELD_OUT = CHECKPOINTS / "held_out.jsonl"


def solve(task: str, prompt: str) -> str | None:
    """The end of the answer, worked out from the prompt alone; None where that is not cheap."""
    if task == "add":
        a, b = map(int, re.findall(r"\d+", prompt))
        return str(a + b)
    if task == "sort":
        return " ".join(sorted(prompt.removeprefix("Sort: ").split()))
    if task == "reverse":
        return " ".join(prompt.removeprefix("Reverse: ").split()[::-1])
    if task == "count_up":
        first, last = map(int, re.findall(r"\d+", prompt))
        return " ".join(str(number) for number in range(first, last + 1))
    if task.startswith("lookup"):
        document, question = prompt.split("} What is ")
        values = json.loads(document + "}")
        return ", ".join(f"{key}: {values[key]}" for key in question.rstrip("?").split(", "))
    if task == "write_json":
        fields = dict(pair.split() for pair in prompt[len("Write JSON with ") : -1].split(", "))
        return json.dumps({k: int(v) if v.isdigit() else v for k, v in fields.items()})
    return None


@pytest.mark.parametrize("task", TASKS)
def test_answers(task):
    rng = random.Random(7)
    for _ in range(200):
        example = generate(rng, task, held_out=False)
        solution = solve(task, example.prompt)
        assert solution is None or example.answer.endswith(solution)


def test_worked_sum_shows_every_column():
    rng = random.Random(3)
    for _ in range(200):
        answer = generate(rng, "add", held_out=False).answer
        for x, y, total in re.findall(r"(\d)\+(\d)=(\d)", answer):
            assert int(x) + int(y) == int(total)


def test_chat_answers_use_the_right_capital():
    rng = random.Random(5)
    for _ in range(200):
        answer = generate(rng, "chat", held_out=False).answer
        for country, capital in CAPITALS.items():
            if f"capital of {country} is" in answer:
                assert capital in answer


def test_held_out_file_is_what_the_generator_writes():
    rows = read_rows(HELD_OUT)
    assert len(rows) >= 500
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)
    assert [(row["task"], row["messages"], row["answer"]) for row in rows] == [
        (example.task, example.messages(), example.answer) for example in held_out_examples()
    ]


def test_training_prompts_are_not_held_out():
    held_out = {row["messages"][0]["content"] for row in read_rows(HELD_OUT)}
    rng = random.Random(0)
    for _ in range(300):
        for task in TASKS:
            assert generate(rng, task, held_out=False).prompt not in held_out
