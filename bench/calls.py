"""How often a served model calls functions rightly, and what a form adds to an answer.

    python -m bench.calls checkpoints/diffusiongemma-tiny-tools

Three things, over HTTP with the client of OpenAI: held-out requests for calls, each as `auto`,
streamed, `required` and named; the loop of a call, its result and the answer in words; and look-ups
that training only ever answered in words, asked for as JSON, with `response_format` once and
without it up to four times. The last line is JSON, which also lands in bench/results/<machine>/.
"""

import argparse
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
from openai import OpenAI

from bench import harness
from bench.clients import PATIENCE_S, serving
from checkpoints.recipes.exact_match import read_rows
from tests.gemma_answers import read_whole_answer
from vllm_dllm.tools import server_process

PARSER = ("--enable-auto-tool-choice", "--tool-call-parser", "gemma4_strict")
AT_ONCE = 8
MOST_TRIES = 4  # one, and three more
STEPS = "vllm_dllm:denoise_steps_total"
WAYS = ("auto", "streamed", "required", "named")
LOOK_UPS = ("lookup_short", "lookup")

Call = tuple[str, dict[str, Any]]
Row = dict[str, Any]


@dataclass
class Tally:
    answers: int = 0
    right: int = 0
    parsed: int = 0  # calls of a function that was offered, with arguments of its schema
    requests: int = 0
    steps: float = 0.0  # denoise steps: forwards that a canvas took part in
    wrong: list[str] = field(default_factory=list)

    def judge(self, rows: list[Row], texts: list[str | None]) -> None:
        """By the answers of the rows, to the letter."""
        for row, text in zip(rows, texts, strict=True):
            self.right += text == row["answer"]
            if text != row["answer"]:
                self.wrong.append(f"{row['messages'][0]['content']} {text}")

    def report(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("answers", "right", "requests", "steps")}
        return found | {"exact_match": self.right / self.answers, "wrong": self.wrong[:10]}


class Asked:
    def __init__(self, port: int, checkpoint: Path) -> None:
        address = f"http://{server_process.HOST}:{port}"
        self.client = OpenAI(
            base_url=f"{address}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
        )
        self._metrics, self._model = f"{address}/metrics", str(checkpoint)

    def chat(self, messages: Any, seed: int, **options: Any) -> Any:
        return self.client.chat.completions.create(
            model=self._model, messages=messages, seed=seed, max_tokens=128, **options
        )

    @contextmanager
    def counting(self, tally: Tally) -> Iterator[None]:
        before = self._steps()
        yield
        tally.steps += self._steps() - before

    def _steps(self) -> float:
        with urllib.request.urlopen(self._metrics) as answer:
            text = answer.read().decode()
        return sum(map(float, re.findall(rf"^{STEPS}\S* (\S+)$", text, re.MULTILINE)))


def expected_call(row: Row) -> Call:
    (call,) = read_whole_answer(row["answer"])[1]
    return call.name, json.loads(call.arguments)


def calls_of(message: Any) -> list[Call]:
    """Arguments that are no JSON end the bench."""
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]


def streamed_calls(chunks: Any) -> list[Call]:
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for part in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            call = found.setdefault(part.index, ["", ""])
            call[0] += part.function.name or ""
            call[1] += part.function.arguments or ""
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


def fits(calls: list[Call], tools: list[Row]) -> bool:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    try:
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])
    except (KeyError, jsonschema.ValidationError):
        return False
    return bool(calls)


def call_by(asked: Asked, way: str, number: int, row: Row) -> list[Call]:
    name = {"type": "function", "function": {"name": expected_call(row)[0]}}
    choice = {"required": "required", "named": name}.get(way, "auto")
    options = {"tools": row["tools"], "tool_choice": choice}
    if way == "streamed":
        return streamed_calls(asked.chat(row["messages"], number, stream=True, **options))
    return calls_of(asked.chat(row["messages"], number, **options).choices[0].message)


def ask_all(rows: list[Row], ask: Callable[[int, Row], Any]) -> list[Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, range(len(rows)), rows))


def measure_calls(asked: Asked, rows: list[Row], way: str) -> dict[str, Any]:
    tally = Tally(answers=len(rows), requests=len(rows))
    with asked.counting(tally):
        found = ask_all(rows, lambda number, row: call_by(asked, way, number, row))
    for row, calls in zip(rows, found, strict=True):
        tally.parsed += fits(calls, row["tools"])
        if calls == [expected_call(row)]:
            tally.right += 1
        else:
            tally.wrong.append(f"{row['messages'][0]['content']} {calls}")
    return tally.report() | {"fit_their_schema": tally.parsed / len(rows)}


def measure_words(asked: Asked, rows: list[Row]) -> dict[str, Any]:
    """Answers in words, where functions could be called."""
    tally = Tally(answers=len(rows), requests=len(rows))

    def ask(number: int, row: Row) -> str | None:
        return asked.chat(row["messages"], number, tools=row["tools"]).choices[0].message.content

    with asked.counting(tally):
        found = ask_all(rows, ask)
    tally.judge(rows, found)
    return tally.report()


def measure_loop(asked: Asked, rows: list[Row]) -> dict[str, Any]:
    """A request, the model's own call, its result and the model's answer."""
    tally = Tally(answers=len(rows), requests=2 * len(rows))

    def ask(number: int, row: Row) -> str | None:
        request, called, result = row["messages"]
        message = asked.chat([request], number, tools=row["tools"]).choices[0].message
        wanted = called["tool_calls"][0]["function"]
        if calls_of(message) != [(wanted["name"], json.loads(wanted["arguments"]))]:
            return None
        back = result | {"tool_call_id": message.tool_calls[0].id}
        history = [request, message.model_dump(exclude_none=True), back]
        return asked.chat(history, number, tools=row["tools"]).choices[0].message.content

    with asked.counting(tally):
        found = ask_all(rows, ask)
    tally.judge(rows, found)
    return tally.report()


def looked_up(row: Row) -> dict[str, str]:
    return dict(pair.split(": ") for pair in row["answer"].split(", "))


def measure_json(asked: Asked, rows: list[Row], *, held: bool) -> dict[str, Any]:
    """Look-ups as JSON: `held` to a schema, or asked again until the answer is right."""
    tally = Tally(answers=len(rows))

    def ask(number: int, row: Row) -> tuple[bool, int, str]:
        wanted = looked_up(row)
        schema = {
            "type": "object",
            "properties": {key: {"type": "string"} for key in wanted},
            "required": list(wanted),
            "additionalProperties": False,
        }
        form = {"name": "values", "schema": schema, "strict": True}
        options = {"response_format": {"type": "json_schema", "json_schema": form}} if held else {}
        text = ""
        for tries in range(1, 2 if held else MOST_TRIES + 1):
            seed = 1000 * tries + number
            answer = asked.chat(row["messages"], seed, **options).choices[0].message
            text = answer.content or ""
            if as_json(text) == wanted:
                return True, tries, text
        return False, tries, text

    with asked.counting(tally):
        found = ask_all(rows, ask)
    for row, (is_right, tries, text) in zip(rows, found, strict=True):
        tally.right += is_right
        tally.requests += tries
        if not is_right:
            tally.wrong.append(f"{row['answer']} / {text}")
    return tally.report()


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def in_json(row: Row) -> Row:
    """The look-up in the words in which the model is asked for JSON."""
    document, _, asked = row["messages"][0]["content"].rpartition(" What is ")
    content = f"{document} Write JSON with {asked.removesuffix('?')}."
    return row | {"messages": [{"role": "user", "content": content}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path("checkpoints")
    parser.add_argument("checkpoint", type=Path, help="what checkpoints/train_tools.sh makes")
    parser.add_argument("--every", type=int, default=1, help="take one row in this many")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine, results = harness.machine(), {}
    rows = read_rows(folder / "held_out_tools.jsonl")[:: args.every]
    look_ups = [row for row in read_rows(folder / "held_out.jsonl") if row["task"] in LOOK_UPS]
    look_ups = look_ups[:: args.every]

    def of(task: str) -> list[Row]:
        return [row for row in rows if row["task"] == task]

    with serving(args.checkpoint, *PARSER) as server:
        asked = Asked(server.port, args.checkpoint)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            **{f"calls, {way}": partial(measure_calls, asked, of("call"), way) for way in WAYS},
            "unnamed calls, auto": lambda: measure_calls(asked, of("call_unnamed"), "auto"),
            "answers to results": lambda: measure_words(asked, of("call_result")),
            "the loop": lambda: measure_loop(asked, of("call_result")),
            "no call": lambda: measure_words(asked, of("no_call")),
            "look-ups, response_format": lambda: measure_json(asked, look_ups, held=True),
            "look-ups, four tries": lambda: measure_json(asked, look_ups, held=False),
            "look-ups in words of JSON, response_format": lambda: measure_json(
                asked, list(map(in_json, look_ups)), held=True
            ),
            "look-ups in words of JSON, four tries": lambda: measure_json(
                asked, list(map(in_json, look_ups)), held=False
            ),
        }
        for name, measure in measures.items():
            found = results[name] = measure()
            print(
                f"{name}: {found['right']} of {found['answers']} right, {found['requests']} "
                f"requests, {found['steps']:.0f} denoise steps",
                flush=True,
            )
    report = {"bench": "calls", "machine": machine, "results": results}
    harness.publish(report, args.out / "calls.json")


if __name__ == "__main__":
    main()
