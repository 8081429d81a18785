"""Whether answers that are held to a schema ever break it, over many thousands of them.

    python -m bench.validity
    python -m bench.validity --schemas jsonschemabench/maskbench/data --progress kept.jsonl

Half of the answers come from logits of noise, on the host alone; the others from the shipped model,
offline, to prompts that it was trained on and to ones that it cannot know. Each answer has a
schema, of `tests/unit/grammar/schemas.json` or of 2,000 drawn from a folder, a seed, and
`max_tokens` that are the least that is known to do, or some more, up to four canvases. Each is
checked with `jsonschema`. A schema counts that a server takes and that has a known answer of at
most 192 tokens. Shows answers that are not valid, and ends with an error if there are any. The last
line is JSON, which also lands in bench/results/<machine>/.

10,000 answers take a core more than an hour. With `--progress` they are kept in a file as they
come, and the same command goes on where it was stopped.
"""

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import jsonschema
import numpy as np
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from bench import harness
from bench.progress import Progress
from checkpoints.recipes.exact_match import read_rows
from tests.unit.grammar.canvases import SCHEMAS, answer, of_schema, text_of
from tests.unit.grammar.test_validity import folder_schemas
from vllm_dllm.grammar.compiler import GrammarError, check_grammar_size, check_schema_size
from vllm_dllm.grammar.completion import find_completion
from vllm_dllm.grammar.patterns import mend_patterns

CHECKPOINTS = harness.ROOT / "checkpoints"
CANVAS = 64
LONGEST = 3 * CANVAS  # tokens: one canvas less than the most
AT_ONCE = 128  # requests that the engine is given together
MOST_SCHEMAS = 2_000  # of a folder
ODD = ("kq 7 {w: 3 zx", '{"', "Write JSON.", "")


@dataclass(frozen=True)
class Usable:
    name: str
    schema: dict[str, Any]
    needed: int  # tokens


@dataclass(frozen=True)
class Task:
    """An answer that is wanted. The same number and schemas make the same task."""

    number: int
    used: Usable
    most: int  # tokens
    rng: random.Random  # for what else is drawn

    @classmethod
    def draw(cls, seed: int, number: int, schemas: list[Usable]) -> "Task":
        rng = random.Random(f"{seed}/{number}")
        used = rng.choice(schemas)
        return cls(number, used, max_tokens(rng, used.needed), rng)


def usable(schemas: Iterator[tuple[str, dict[str, Any]]], outcomes: Counter[str]) -> list[Usable]:
    found = []
    for name, schema in schemas:
        try:
            check_grammar_size("json", json.dumps(schema))
            check_schema_size(schema)
            state = of_schema(mend_patterns(schema))
        except GrammarError:
            outcomes["schemas that are refused"] += 1
            continue
        needed = find_completion(state, LONGEST)
        if needed is None:
            outcomes["schemas without a known short answer"] += 1
        else:
            found.append(Usable(name, schema, len(needed)))
    return found


def max_tokens(rng: random.Random, needed: int) -> int:
    """The least, a few more, or any number up to four canvases."""
    more = rng.choice([0, 1, 5, rng.randint(0, 4 * CANVAS - needed)])
    return needed + more


def complaint(schema: dict[str, Any], text: str) -> str | None:
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def outcome(of: str, task: Task, num_tokens: int, text: str) -> dict[str, Any]:
    error = complaint(task.used.schema, text)
    if error is None and num_tokens > task.most:
        error = f"{num_tokens} tokens of {task.most}"
    found: dict[str, Any] = {"number": task.number, "of": of, "tokens": num_tokens}
    if error:
        what = f"{of}, {task.used.name}, {task.most} tokens: {text[:300]!r}: {error}"
        print(what, flush=True)
        found["invalid"] = what
    return found


def answer_noise(progress: Progress, tasks: list[Task]) -> None:
    for task in tasks:
        state = of_schema(mend_patterns(task.used.schema))
        scale = task.rng.choice([1.0, 4.0, 12.0])
        tokens = answer(state, np.random.default_rng(task.number), CANVAS, task.most, scale)
        progress.add(outcome("noise", task, len(tokens), text_of(tokens)))


def answer_trained(progress: Progress, tasks: list[Task]) -> None:
    llm = LLM(
        str(CHECKPOINTS / "diffusiongemma-tiny"),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 29,
        diffusion_config={"canvas_length": CANVAS},
    )
    asked = [row["messages"] for row in read_rows(CHECKPOINTS / "held_out.jsonl")]
    asked = [messages for messages in asked if len(messages[0]["content"]) < 400]
    asked += [[{"role": "user", "content": text}] for text in ODD] * (len(asked) // len(ODD))
    for first in range(0, len(tasks), AT_ONCE):
        batch = tasks[first : first + AT_ONCE]
        params = [
            SamplingParams(
                max_tokens=task.most,
                temperature=task.rng.choice([0.0, 1.0, 2.0]),
                seed=task.number,
                structured_outputs=StructuredOutputsParams(json=task.used.schema),
            )
            for task in batch
        ]
        outputs = llm.chat([task.rng.choice(asked) for task in batch], params, use_tqdm=False)
        for task, output in zip(batch, outputs, strict=True):
            found = output.outputs[0]
            progress.add(outcome("trained", task, len(found.token_ids), found.text))


def drawn(folder: str, seed: int) -> list[tuple[str, dict[str, Any]]]:
    found = list(folder_schemas(folder))
    return random.Random(seed).sample(found, min(MOST_SCHEMAS, len(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", help="a folder of more schemas")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--progress", type=Path, help="where outcomes are kept, for another run")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine, counts = harness.machine(), Counter[str]()
    every = [*SCHEMAS.items(), *(drawn(args.schemas, args.seed) if args.schemas else ())]
    schemas = usable(iter(every), counts)
    print(f"{len(schemas)} of {len(every)} schemas {dict(counts)}", flush=True)
    setting = {
        "answers": args.answers,
        "seed": args.seed,
        "commit": machine["commit"],
        "schemas": [(used.name, used.needed) for used in schemas],
    }
    progress = Progress(setting, args.answers, args.progress)
    half = args.answers // 2
    draw = partial(Task.draw, args.seed, schemas=schemas)
    answer_noise(progress, [draw(i) for i in range(half) if not progress.has(i)])
    trained = [draw(i) for i in range(half, args.answers) if not progress.has(i)]
    if trained:
        answer_trained(progress, trained)
    for found in progress.outcomes:
        counts[f"{found['of']}: {'invalid' if 'invalid' in found else 'valid'}"] += 1
    canvases = Counter(-(-found["tokens"] // CANVAS) for found in progress.outcomes)
    invalid = [found["invalid"] for found in progress.outcomes if "invalid" in found]
    report = {
        "bench": "validity",
        "machine": machine,
        "schemas": len(schemas),
        "outcomes": dict(counts),
        "answers_by_canvases": dict(sorted(canvases.items())),
        "invalid": invalid,
    }
    harness.publish(report, args.out / "validity.json")
    if invalid:
        raise SystemExit(f"{len(invalid)} answers are not valid")


if __name__ == "__main__":
    main()
