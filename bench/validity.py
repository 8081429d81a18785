"""Whether answers that are held to a schema ever break it, over many thousands of them.

    python -m bench.validity
    python -m bench.validity --schemas jsonschemabench/maskbench/data --answers 20000

Half of the answers come from logits of noise, on the host alone; the others from the shipped model,
offline, to prompts that it was trained on and to ones that it cannot know. Each answer has a
schema, of `tests/unit/grammar/schemas.json` or of a folder, a seed, and `max_tokens` that are the
least that is known to do, or some more, up to four canvases. Each is checked with `jsonschema`. A
schema counts that a server takes and that has a known answer of at most 192 tokens. Shows answers
that are not valid, and ends with an error if there are any. The last line is JSON, which also lands
in bench/results/<machine>/.
"""

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import jsonschema
import numpy as np
from llguidance import LLMatcher
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from bench import harness
from tests.unit.grammar.canvases import SCHEMAS, answer, start, text_of
from tests.unit.grammar.test_validity import folder_schemas
from vllm_dllm.grammar.closing import completion
from vllm_dllm.grammar.compile import GrammarError, check_schema, check_size
from vllm_dllm.tools.pretrain.exact_match import read_rows

CHECKPOINTS = harness.ROOT / "checkpoints"
CANVAS = 64
LONGEST = 3 * CANVAS  # tokens: one canvas less than the most
AT_ONCE = 512  # requests that the engine is given together
ODD = ("kq 7 {w: 3 zx", '{"', "Write JSON.", "")


@dataclass(frozen=True)
class Usable:
    name: str
    schema: dict[str, Any]
    needed: int  # tokens


def usable(schemas: Iterator[tuple[str, dict[str, Any]]], outcomes: Counter[str]) -> list[Usable]:
    found = []
    for name, schema in schemas:
        try:
            text = json.dumps(schema)
            check_size("json", text)
            check_schema(schema)
            state = start(LLMatcher.grammar_from_json_schema(text))
        except GrammarError:
            outcomes["schemas that are refused"] += 1
            continue
        needed = completion(state, LONGEST)
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


class Checked:
    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.canvases: Counter[int] = Counter()
        self.invalid: list[str] = []

    def check(self, of: str, used: Usable, most: int, num_tokens: int, text: str) -> None:
        error = complaint(used.schema, text)
        if error is None and num_tokens > most:
            error = f"{num_tokens} tokens of {most}"
        self.outcomes[f"{of}: {'invalid' if error else 'valid'}"] += 1
        self.canvases[-(-num_tokens // CANVAS)] += 1
        if error:
            self.invalid.append(f"{of}, {used.name}, {most} tokens: {text[:300]!r}: {error}")
            print(self.invalid[-1], flush=True)


def answer_noise(checked: Checked, schemas: list[Usable], count: int, rng: random.Random) -> None:
    for seed in range(count):
        used = rng.choice(schemas)
        most = max_tokens(rng, used.needed)
        state = start(LLMatcher.grammar_from_json_schema(json.dumps(used.schema)))
        scale = rng.choice([1.0, 4.0, 12.0])
        tokens = answer(state, np.random.default_rng(seed), CANVAS, most, scale)
        checked.check("noise", used, most, len(tokens), text_of(tokens))
        if (seed + 1) % 500 == 0:
            print(f"noise: {seed + 1} of {count}", flush=True)


def answer_trained(checked: Checked, schemas: list[Usable], count: int, rng: random.Random) -> None:
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
    done = 0
    while done < count:
        chosen = [rng.choice(schemas) for _ in range(min(AT_ONCE, count - done))]
        params = [
            SamplingParams(
                max_tokens=max_tokens(rng, used.needed),
                temperature=rng.choice([0.0, 1.0, 2.0]),
                seed=done + number,
                structured_outputs=StructuredOutputsParams(json=used.schema),
            )
            for number, used in enumerate(chosen)
        ]
        outputs = llm.chat([rng.choice(asked) for _ in chosen], params, use_tqdm=False)
        for used, param, output in zip(chosen, params, outputs, strict=True):
            found = output.outputs[0]
            checked.check("trained", used, param.max_tokens, len(found.token_ids), found.text)
        done += len(chosen)
        print(f"trained: {done} of {count}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", help="a folder of more schemas")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine, checked, rng = harness.machine(), Checked(), random.Random(args.seed)
    every = [*SCHEMAS.items(), *(folder_schemas(args.schemas) if args.schemas else ())]
    schemas = usable(iter(every), checked.outcomes)
    print(f"{len(schemas)} of {len(every)} schemas {dict(checked.outcomes)}", flush=True)
    answer_noise(checked, schemas, args.answers // 2, rng)
    answer_trained(checked, schemas, args.answers - args.answers // 2, rng)
    report = {
        "bench": "validity",
        "machine": machine,
        "schemas": len(schemas),
        "outcomes": dict(checked.outcomes),
        "answers_by_canvases": dict(sorted(checked.canvases.items())),
        "invalid": checked.invalid,
    }
    harness.publish(report, args.out / "validity.json")
    if checked.invalid:
        raise SystemExit(f"{len(checked.invalid)} answers are not valid")


if __name__ == "__main__":
    main()
