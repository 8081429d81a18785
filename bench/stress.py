"""What a form is worth where a model does badly without one.

    python -m bench.stress checkpoints/diffusiongemma-tiny
    python -m bench.stress checkpoints/diffusiongemma-tiny-tools
    python -m bench.stress checkpoints/diffusiongemma-tiny-NVFP4

Each prompt is asked once with a grammar, and without one up to four times, until the answer fits,
as a client would ask. Forwards are counted, not timed, so what else the machine does is all the
same: a denoise step of a request is one. The tasks: JSON as in training, of 5 to 8 fields, of which
training has 4 at most, look-ups asked for as JSON, which training only ever answered in words, and,
of a model with their tokens, calls of functions. The settings: the checkpoint's own, caps of 2
steps and 1, temperature 2, and no more `max_tokens` than the right answer has. The last line is
JSON, which also lands in bench/results/<machine>/.
"""

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import jsonschema
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from bench import harness
from bench.calls import as_json, expected_call, fits, in_json, looked_up
from checkpoints.recipes.exact_match import read_rows
from checkpoints.recipes.words import CAPITALS, NAMES, NOUNS
from tests.gemma_answers import read_whole_answer
from vllm_dllm.grammar.gemma_calls import CALL

FOLDER = harness.ROOT / "checkpoints"
MOST_TRIES = 4  # one, and three more
MAX_TOKENS = 128
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "2 steps": {"extra_args": {"diffusion_max_steps": 2}},
    "1 step": {"extra_args": {"diffusion_max_steps": 1}},
    "temperature 2": {"temperature": 2.0},
    "tight": {},
}


@dataclass(frozen=True)
class Asked:
    """One prompt, and what a right answer to it is."""

    messages: list[dict[str, Any]]
    form: StructuredOutputsParams
    answer: str  # a right one, of as many tokens as any
    read: Callable[[str], Any]  # of an answer: its values; None: it does not fit
    wanted: Any
    tools: list[dict[str, Any]] | None = None


def of_values(messages: list[dict[str, Any]], values: dict[str, Any]) -> Asked:
    kinds = {str: "string", int: "integer"}
    schema = {
        "type": "object",
        "properties": {key: {"type": kinds[type(value)]} for key, value in values.items()},
        "required": list(values),
        "additionalProperties": False,
    }

    def read(text: str) -> Any:
        found = as_json(text)
        return found if jsonschema.Draft202012Validator(schema).is_valid(found) else None

    return Asked(messages, StructuredOutputsParams(json=schema), json.dumps(values), read, values)


def of_call(row: dict[str, Any]) -> Asked:
    functions = [tool["function"] for tool in row["tools"]]
    calls = {"type": "gemma4_calls", "functions": functions, "at_least_one": True}
    form = StructuredOutputsParams(structural_tag=json.dumps({"format": calls}))

    def read(text: str) -> Any:
        found = [(call.name, as_json(call.arguments)) for call in read_whole_answer(text)[1]]
        return found if fits(found, row["tools"]) else None

    return Asked(row["messages"], form, row["answer"], read, [expected_call(row)], row["tools"])


def many_fields(rng: random.Random) -> Asked:
    keys = rng.sample(NOUNS, 5)
    values: dict[str, Any] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(10, 99),
        "city": rng.choice(list(CAPITALS.values())),
        **{key: rng.choice([rng.randint(10, 99), rng.choice(NOUNS)]) for key in keys},
    }
    chosen = dict(rng.sample(list(values.items()), rng.randint(5, 8)))
    listing = ", ".join(f"{key} {value}" for key, value in chosen.items())
    return of_values([{"role": "user", "content": f"Write JSON with {listing}."}], chosen)


def tasks(count: int) -> dict[str, list[Asked]]:
    rows = read_rows(FOLDER / "held_out.jsonl")

    def of(name: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["task"] == name][:count]

    rng = random.Random(0)
    found = {
        "JSON": [of_values(row["messages"], json.loads(row["answer"])) for row in of("write_json")],
        "5 to 8 fields": [many_fields(rng) for _ in range(count)],
    }
    for name, task in (("look-ups as JSON", "lookup_short"), ("long look-ups as JSON", "lookup")):
        found[name] = [of_values(in_json(row)["messages"], looked_up(row)) for row in of(task)]
    return found


def calls(count: int) -> list[Asked]:
    rows = read_rows(FOLDER / "held_out_tools.jsonl")
    return [of_call(row) for row in rows if row["task"] == "call"][:count]


@dataclass
class Tally:
    right: int = 0
    fitting: int = 0
    forwards: int = 0
    requests: int = 0
    wrong: list[str] = field(default_factory=list)


class Model:
    def __init__(self, checkpoint: Path, trace: Path) -> None:
        self._trace = trace
        trace.unlink(missing_ok=True)
        self.llm = LLM(
            str(checkpoint),
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=32,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 29,
            additional_config={"vllm_dllm": {"trace_path": str(trace)}},
        )
        self.tokenizer = self.llm.get_tokenizer()

    def has_calls(self) -> bool:
        return CALL in self.tokenizer.get_vocab()

    def ask(self, asked: list[Asked], setting: str, *, held: bool, seed: int) -> list[str]:
        prompts = [
            {
                "prompt_token_ids": self.tokenizer.apply_chat_template(
                    one.messages, tools=one.tools, add_generation_prompt=True, return_dict=False
                )
            }
            for one in asked
        ]
        params = [
            SamplingParams(
                max_tokens=self._length(one) if setting == "tight" else MAX_TOKENS,
                seed=seed + i,
                skip_special_tokens=one.tools is None,
                structured_outputs=one.form if held else None,
                **SETTINGS[setting],
            )
            for i, one in enumerate(asked)
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        end = self.tokenizer.eos_token
        return [output.outputs[0].text.removesuffix(end) for output in outputs]

    def _length(self, one: Asked) -> int:
        return len(self.tokenizer.encode(one.answer, add_special_tokens=False))

    def forwards(self) -> int:
        """So far: each denoise step of a request is a line."""
        return self._trace.read_bytes().count(b"\n") if self._trace.exists() else 0

    def measure(self, asked: list[Asked], setting: str, *, held: bool) -> Tally:
        tally, before, left = Tally(), self.forwards(), list(asked)
        for tries in range(1 if held else MOST_TRIES):
            if not left:
                break
            texts = self.ask(left, setting, held=held, seed=1000 * tries)
            tally.requests += len(left)
            misfits = []
            for one, text in zip(left, texts, strict=True):
                found = one.read(text)
                tally.fitting += found is not None
                tally.right += found == one.wanted
                if found is None:
                    misfits.append(one)
                if found != one.wanted:
                    tally.wrong.append(f"{one.answer} / {text}")
            left = misfits
        tally.forwards = self.forwards() - before
        return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=int, default=24, help="of each task")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine, results = harness.machine(), {}
    trace = harness.ROOT / "build" / "stress_trace.jsonl"
    trace.parent.mkdir(exist_ok=True)
    model = Model(args.checkpoint, trace)
    every = tasks(args.prompts) | ({"calls": calls(args.prompts)} if model.has_calls() else {})
    sums: Counter[str] = Counter()
    print("right, fitting, forwards (requests): held to the form / free, up to four tries")
    for name, asked in every.items():
        for setting in SETTINGS:
            row = {}
            for way, held in (("held", True), ("free", False)):
                tally = model.measure(asked, setting, held=held)
                row[way] = {**vars(tally), "prompts": len(asked), "wrong": tally.wrong[:5]}
                sums[f"{way}, right"] += tally.right
                sums[f"{way}, forwards"] += tally.forwards
            results[f"{name}, {setting}"] = row
            shown = [
                f"{way['right']:3} {way['fitting']:3} {way['forwards']:5} ({way['requests']})"
                for way in row.values()
            ]
            print(f"{name:22} {setting:14} {' / '.join(shown)} of {len(asked)}", flush=True)
    report = {"bench": "stress", "machine": machine, "results": results, "sums": dict(sums)}
    harness.publish(report, args.out / f"stress-{args.checkpoint.name}.json")


if __name__ == "__main__":
    main()
