"""What predicted outputs save: denoise steps a block, and what they do to the answers.

    python -m bench.prediction

The shipped checkpoint answers greedily, without a prediction and with several kinds: the answer
itself, the answer with tokens changed, added or left out, the answer to another prompt. Most of the
held-out answers fit one canvas; those that count are two, so the second follows the first through
the prediction. Counts steps, no times: the numbers are the same on every machine, but for rounding.
Whether predictions make answers worse is a result like the others. Refuses to report when the tests
of predictions are red.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

from bench import harness

CHECKPOINTS = harness.ROOT / "checkpoints"
FIRST_OF_TEXT = 7  # ids before it are special tokens
Prediction = list[int] | None
Kind = Callable[[int], Prediction]


@dataclass(frozen=True)
class Task:
    name: str
    prompt: str
    answer: str


def held_out(count: int) -> list[Task]:
    rows = [json.loads(line) for line in (CHECKPOINTS / "held_out.jsonl").open()]
    return [
        Task(row["task"], row["messages"][0]["content"], row["answer"])
        for row in rows[:: max(1, len(rows) // count)]
    ]


def counting() -> list[Task]:
    """Of the kind that the model learned: up to a 9, here in 71 to 104 tokens."""
    spans = [(last - n, last) for last in range(49, 100, 10) for n in range(23, 35) if last > n + 9]
    return [
        Task(
            "count_up",
            f"Count from {first} to {last}.",
            " ".join(map(str, range(first, last + 1))),
        )
        for first, last in spans
    ]


class Engine:
    def __init__(self, folder: Path) -> None:
        self._trace = folder / "trace.jsonl"
        self._llm = LLM(
            str(CHECKPOINTS / "diffusiongemma-tiny"),
            dtype="float32",
            max_model_len=1024,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 29,
            diffusion_config={"canvas_length": 64},
            additional_config={"vllm_dllm": {"trace_path": str(self._trace)}},
        )
        self.tokenizer = self._llm.get_tokenizer()
        self.vocab_size = len(self.tokenizer)

    def run(self, tasks: list[Task], predictions: list[Prediction]) -> dict[str, Any]:
        prompts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": task.prompt}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for task in tasks
        ]
        params = [
            SamplingParams(
                temperature=0.0,
                seed=seed,
                max_tokens=256,
                extra_args={"diffusion_prediction": prediction},
            )
            for seed, prediction in enumerate(predictions)
        ]
        before = self._trace.stat().st_size if self._trace.exists() else 0
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        steps = [json.loads(line) for line in self._trace.read_bytes()[before:].splitlines()]
        texts = [output.outputs[0].text for output in outputs]
        return {
            "exact_match": harness.exact_match(texts, [task.answer for task in tasks]),
            "steps": len(steps),
            "blocks": sum(step["finished"] for step in steps),
            "tokens": [self.tokenizer.encode(text, add_special_tokens=False) for text in texts],
        }


def kinds(answers: list[list[int]], tasks: list[Task], vocab_size: int) -> dict[str, Kind]:
    """By name: the prediction for each row."""
    chance = random.Random(0)

    def edited(tokens: list[int], edits: list[str], count: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            place, edit = chance.randrange(len(found) or 1), chance.choice(edits)
            if edit != "leave out":
                found.insert(place, chance.randrange(FIRST_OF_TEXT, vocab_size))
            if edit != "add" and len(found) > 1:
                del found[min(place + (edit == "change"), len(found) - 1)]
        return found

    def one(edit: str) -> Kind:
        return lambda row: edited(answers[row], [edit], 1)

    def share(of_tokens: float) -> Kind:
        edits = ["change", "add", "leave out"]
        return lambda row: edited(answers[row], edits, max(1, int(of_tokens * len(answers[row]))))

    def of_same_task(row: int) -> Prediction:
        same = [i for i, task in enumerate(tasks) if task.name == tasks[row].name]
        return answers[same[(same.index(row) + 1) % len(same)]]

    return {
        "none": lambda row: None,
        "the answer": lambda row: answers[row],
        "one token changed": one("change"),
        "one token more": one("add"),
        "one token less": one("leave out"),
        "5% edited": share(0.05),
        "20% edited": share(0.2),
        "another prompt's, same task": of_same_task,
        "another prompt's": lambda row: answers[row - len(answers) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=506, help="of the held-out ones")
    count = parser.parse_args().prompts
    harness.require_green("unit/denoise/test_prediction.py", "unit/step/test_predictions.py")
    report: dict[str, Any] = harness.machine()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        groups = {"held out": held_out(count), "two canvases": counting()}
        for group, tasks in groups.items():
            plain = engine.run(tasks, [None] * len(tasks))
            print(f"\n{group:30} {'right':>6} {'blocks':>8} {'steps a block':>14}")
            for name, predict in kinds(plain["tokens"], tasks, engine.vocab_size).items():
                found = engine.run(tasks, [predict(row) for row in range(len(tasks))])
                del found["tokens"]
                found["steps_per_block"] = found["steps"] / found["blocks"]
                report[f"{group}/{name}"] = found
                print(
                    f"{name:30} {found['exact_match']:6.1%} {found['blocks']:8}"
                    f" {found['steps_per_block']:14.2f}",
                    flush=True,
                )
    harness.publish(report, harness.results_folder() / "prediction.json")


if __name__ == "__main__":
    main()
