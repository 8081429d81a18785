"""Tasks with exactly checkable answers, generated from a seed.

    python -m checkpoints.recipes.tasks > checkpoints/held_out.jsonl
    python -m checkpoints.recipes.tasks --calibration > checkpoints/calibration.jsonl

A prompt belongs either to training or to the held-out set, decided by a hash of its text, so the
two never share a prompt whatever the seeds are. Answers show their work where a small model needs
it (sums column by column), and everything is laid out so that one position depends on few others.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpoints.recipes.words import CAPITALS, NAMES, NOUNS

HELD_OUT_SHARE = 16  # one prompt in this many is held out
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Example:
    task: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.prompt.encode()).digest()
        return digest[0] % HELD_OUT_SHARE == 0

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.prompt}]

    def tools(self) -> list[dict[str, Any]] | None:
        """Writes them as a client of OpenAI's API sends them."""
        return None


def add(rng: random.Random) -> tuple[str, str]:
    """A sum without carries, column by column from the left: "2+4=6, 3+1=4, =64"."""
    columns = [(x, rng.randint(0, 9 - x)) for x in (rng.randint(1, 8) for _ in range(3))]
    columns = columns[: rng.choice((2, 3))]
    a, b = (int("".join(str(column[i]) for column in columns)) for i in range(2))
    steps = ", ".join(f"{x}+{y}={x + y}" for x, y in columns)
    return f"Add {a} and {b:0{len(columns)}d}.", f"{steps}, ={a + b}"


def sort(rng: random.Random) -> tuple[str, str]:
    letters = rng.sample(LETTERS, rng.randint(3, 8))
    return f"Sort: {' '.join(letters)}", " ".join(sorted(letters))


def reverse(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(NOUNS, rng.randint(3, 10))
    return f"Reverse: {' '.join(words)}", " ".join(reversed(words))


def count_up(rng: random.Random) -> tuple[str, str]:
    """Counting from a to b, which ends in 9; above 20 numbers the answer needs a second canvas."""
    first = rng.randint(10, 90)
    last = rng.choice([n for n in range(19, 100, 10) if first + 2 <= n < first + 40])
    return f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1)))


def _lookup(rng: random.Random, num_pairs: int, num_asked: int | None = None) -> tuple[str, str]:
    """Values of a JSON document with four tokens per pair."""
    keys = rng.sample(NOUNS, num_pairs)
    document = {key: rng.choice(NAMES) for key in keys}
    asked = rng.sample(keys, num_asked or rng.randint(1, min(8, num_pairs)))
    answer = ", ".join(f"{key}: {document[key]}" for key in asked)
    return f"{json.dumps(document)} What is {', '.join(asked)}?", answer


def lookup_short(rng: random.Random) -> tuple[str, str]:
    """The look-up within the sliding window, from which a model learns the long one."""
    return _lookup(rng, rng.randint(1, 8))


def lookup(rng: random.Random) -> tuple[str, str]:
    """Documents of 8 to 96 pairs: prompts of 1 to 12 sliding windows."""
    return _lookup(rng, int(8 * 12 ** rng.random()))


def lookup_dense(rng: random.Random) -> tuple[str, str]:
    """All values of a document, in another order: the most look-ups a canvas of 64 holds."""
    num_pairs = rng.randint(4, 15)
    return _lookup(rng, num_pairs, num_asked=num_pairs)


def write_json(rng: random.Random) -> tuple[str, str]:
    fields: list[tuple[str, str | int]] = [
        ("name", rng.choice(NAMES)),
        ("age", rng.randint(10, 99)),
        ("city", rng.choice(list(CAPITALS.values()))),
    ]
    keys = rng.sample(NOUNS, 2)
    fields += [(keys[0], rng.randint(10, 99)), (keys[1], rng.choice(NOUNS))]
    chosen = rng.sample(fields, rng.randint(1, 4))
    listing = ", ".join(f"{key} {value}" for key, value in chosen)
    return f"Write JSON with {listing}.", json.dumps(dict(chosen))


def chat(rng: random.Random) -> tuple[str, str]:
    name, old = rng.choice(NAMES), rng.randint(10, 99)
    country, capital = rng.choice(list(CAPITALS.items()))
    hello = rng.choice(["Hello", "Hi", "Good morning", "Good day"])
    noun = rng.choice(NOUNS)
    return rng.choice(
        [
            (f"{hello}! I am {name}.", f"{hello} {name}! How can I help you?"),
            (f"{hello}! My name is {name}.", f"{hello} {name}! How can I help you?"),
            (
                f"{hello}! What is the capital of {country}?",
                f"{hello}! The capital of {country} is {capital}.",
            ),
            (
                f"I am {name}. I live in {capital}. What is my name?",
                f"Your name is {name}.",
            ),
            (
                f"I am {name}. I live in {capital}. What is my city?",
                f"Your city is {capital}, the capital of {country}.",
            ),
            (f"I am {name}. I am {old} years old. How old am I?", f"You are {old} years old."),
            (f"{hello}! Please write {noun}.", f"{noun}"),
        ]
    )


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "add": add,
    "sort": sort,
    "reverse": reverse,
    "count_up": count_up,
    "lookup_short": lookup_short,
    "lookup": lookup,
    "write_json": write_json,
    "chat": chat,
}
TRAINING_TASKS = TASKS | {"lookup_dense": lookup_dense}
SERVING_NOTE = (
    "This small model knows a few tasks only, in these words: 'Add 23 and 41.', 'Sort: q d x a', "
    "'Reverse: rose chair lamp', 'Count from 31 to 69.', 'Write JSON with name Nora, age 31.', "
    "'Hi! I am Nora.', 'Hello! What is the capital of France?', and a JSON document before "
    "'What is cup, roof?'. Anything else gets nonsense."
)
"""What config.json of models that were trained on these tells people who serve them."""


def generate(rng: random.Random, task: str, *, held_out: bool) -> Example:
    """A random example of `task` from the training side or the held-out side."""
    while True:
        example = Example(task, *TRAINING_TASKS[task](rng))
        if example.held_out == held_out:
            return example


def held_out_examples(per_task: int = 70, seed: int = 1) -> list[Example]:
    """`per_task` different held-out prompts of every task; a task with fewer gives all it has."""
    rng = random.Random(seed)
    examples: list[Example] = []
    for task in TASKS:
        seen: dict[str, Example] = {}
        for _ in range(20 * per_task):
            example = generate(rng, task, held_out=True)
            seen[example.prompt] = example
            if len(seen) == per_task:
                break
        examples += seen.values()
    return examples


def calibration_examples(per_task: int = 16, seed: int = 2) -> list[Example]:
    """Prompts of the training side, to calibrate a quantised checkpoint with."""
    rng = random.Random(seed)
    return [generate(rng, task, held_out=False) for task in TASKS for _ in range(per_task)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    text = "print prompts of the training side, without answers, for `vllm-dllm quantize`"
    parser.add_argument("--calibration", action="store_true", help=text)
    if parser.parse_args().calibration:
        for example in calibration_examples():
            print(json.dumps({"task": example.task, "messages": example.messages()}))
        return
    for example in held_out_examples():
        row = {"task": example.task, "messages": example.messages(), "answer": example.answer}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
