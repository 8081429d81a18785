"""Three servers under mixed traffic: adapters, drafters, tools, forms, mistakes and broken streams.

    python -m bench.mixed_traffic --minutes 30

Each question is asked once while nobody else asks. Then the clients of each server draw questions
at random, each streamed or not, some hang up amid a stream, some ask for what does not exist. Every
answer is compared with the first: equal, or changed by rounding, as sums are added in another order
in other batches; an answer that is another adapter's is counted apart. The run is red if a server
ends, if an answer is not HTTP 200, if a mistake is not HTTP 400, or if an adapter's answer goes to
somebody else. The last line is JSON, which also lands in bench/results/<machine>/.
"""

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI

from bench import harness
from bench.clients import PATIENCE_S, serving
from checkpoints.recipes.exact_match import read_rows
from tests.adapters import make_adapter
from vllm_dllm.tools import server_process

FOLDER = harness.ROOT / "checkpoints"
ADAPTERS = ("first", "second", "third")
RANK = 8
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
CLIENTS = 6  # of each server
HANGS_UP, STREAMS, MISTAKES = 0.05, 0.5, 0.05
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA},
}

Body = dict[str, Any]
Answer = tuple[Any, ...]  # text, reasoning, calls and why it ended


@dataclass
class System:
    name: str
    checkpoint: Path
    options: list[str]
    bodies: list[Body]  # of chat requests
    mistakes: list[Body]
    models: tuple[str, ...] = ()  # its own, if there are no others


@dataclass
class Traffic:
    """What one server's clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def systems(adapters: Path) -> Iterator[System]:
    rows = read_rows(FOLDER / "held_out.jsonl")
    chats = [{"messages": row["messages"], "max_tokens": 48} for row in rows[:: len(rows) // 12]]
    drafts = {
        "method": "dflash",
        "model": str(FOLDER / "qwen3-tiny-dflash"),
        "num_speculative_tokens": 15,
    }
    lora = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"]
    plain = [*chats, {**chats[0], "response_format": FORM}, {**chats[1], "logprobs": True}]
    for name, checkpoint, options in (
        ("masked", FOLDER / "sdar-tiny", []),
        (
            "drafter",
            FOLDER / "qwen3-tiny-target",
            ["--enforce-eager", "--speculative-config", json.dumps(drafts)],
        ),
    ):
        paths = []
        for seed, adapter in enumerate(ADAPTERS):
            path = adapters / f"{name}-{adapter}"
            make_adapter(path, checkpoint, LAYERS, seed, RANK)
            paths.append(f"{adapter}={path}")
        yield System(
            name,
            checkpoint,
            [*options, *lora, "--lora-modules", *paths],
            [body | {"temperature": 0} for body in plain],
            [{"model": "nobody"}, {"temperature": -1}, {"response_format": {"type": "xml"}}],
            (str(checkpoint), *ADAPTERS),
        )
    yield System(
        "tools",
        FOLDER / "diffusiongemma-tiny-tools",
        ["--enable-auto-tool-choice", "--tool-call-parser", "gemma4_strict"],
        list(calling()),
        [{"tool_choice": "all"}, {"diffusion_max_steps": 0}, {"response_format": {"type": "xml"}}],
    )


def calling() -> Iterator[Body]:
    rows = [row for row in read_rows(FOLDER / "held_out_tools.jsonl") if row["task"] == "call"]
    for seed, row in enumerate(rows[:8]):
        body = {"messages": row["messages"], "tools": row["tools"], "seed": seed}
        yield body | {"max_tokens": 96}
        yield body | {"max_tokens": 96, "tool_choice": "required"}
        yield body | {"max_tokens": 3 + 2 * seed}
        yield body | {"max_tokens": 96, "tool_choice": "none"}
        yield {"messages": row["messages"], "seed": seed, "response_format": FORM, "max_tokens": 64}


def ask(client: OpenAI, body: Body, streamed: bool, hangs_up: bool = False) -> Answer | None:
    """None: this client has hung up."""
    request = {"stream": streamed, **body}
    own = {key: request.pop(key) for key in list(request) if key.startswith(("vllm", "diffusion"))}
    found = client.chat.completions.create(**request, extra_body=own)
    if not streamed:
        (choice,) = found.choices
        calls = choice.message.tool_calls or []
        said = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        return choice.message.content or "", said, choice.finish_reason
    text, names, arguments, ended = "", [], [], None
    for chunk in found:
        if hangs_up and chunk.choices and chunk.choices[0].delta.content:
            found.close()
            return None
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ended = choice.finish_reason or ended
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    names.append(call.function.name)
                    arguments.append("")
                arguments[-1] += call.function.arguments or ""
    return text, list(zip(names, map(json.loads, arguments), strict=True)), ended


def key(body: Body) -> str:
    return json.dumps(body, sort_keys=True)


def others(body: Body, alone: dict[str, Answer | None]) -> list[Answer | None]:
    """What the question's other models answer."""
    same = json.loads(key(body))
    model = same.pop("model")
    return [
        answer
        for other, answer in alone.items()
        if (found := json.loads(other)).pop("model") != model and found == same
    ]


def traffic(system: System, port: int, minutes: float, begin: threading.Barrier) -> Traffic:
    """Of a server that is there; it begins when all of them have answered all questions alone."""
    client = OpenAI(
        base_url=f"http://{server_process.HOST}:{port}/v1",
        api_key="none",
        timeout=PATIENCE_S,
        max_retries=0,
    )
    models = system.models or (str(system.checkpoint),)
    bodies = [{**body, "model": model} for body in system.bodies for model in models]
    alone = {key(body): ask(client, body, streamed=False) for body in bodies}
    seen, lock = Traffic(), threading.Lock()
    begin.wait()
    end = time.monotonic() + 60 * minutes

    def note(what: str, fault: str | None = None) -> None:
        with lock:
            seen.counts[what] += 1
            if fault is not None:
                seen.faults.append(fault)

    def one(body: Body, chance: random.Random) -> None:
        if chance.random() < MISTAKES:
            wrong = {**body, **chance.choice(system.mistakes)}
            try:
                ask(client, wrong, streamed=chance.random() < STREAMS)
                note("mistakes answered", f"answered: {wrong}")
            except APIStatusError as error:
                is_refused = error.status_code in (400, 404)
                note("mistakes refused", None if is_refused else f"{error}: {wrong}")
            return
        hangs_up = chance.random() < HANGS_UP
        try:
            answer = ask(client, body, hangs_up or chance.random() < STREAMS, hangs_up)
        except (APIStatusError, APIConnectionError) as error:
            note("failed", f"{error}: {body}")
            return
        expected = alone[key(body)]
        if answer is None:
            note("hung up")
        elif answer == expected:
            note("as alone")
        elif answer in others(body, alone):
            note("another's", f"{answer} is another adapter's answer to {body}")
        else:
            note("other than alone")

    def client_of(number: int) -> None:
        chance = random.Random(f"{system.name} {number}")
        while time.monotonic() < end:
            one(chance.choice(bodies), chance)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client_of, range(CLIENTS)))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        asked = list(systems(folder))
        servers = [
            stack.enter_context(serving(system.checkpoint, *system.options)) for system in asked
        ]
        begin = threading.Barrier(len(asked))
        with ThreadPoolExecutor(len(asked)) as pool:
            seen = [
                pool.submit(traffic, system, server.port, args.minutes, begin)
                for system, server in zip(asked, servers, strict=True)
            ]
            found = {system.name: done.result() for system, done in zip(asked, seen, strict=True)}
        for server in servers:
            server.check_alive()
    for name, of_server in found.items():
        print(name, dict(of_server.counts), *of_server.faults[:5], sep="\n  ")
    report = {
        "bench": "mixed_traffic",
        "machine": harness.machine(),
        "minutes": args.minutes,
        "clients": CLIENTS * len(found),
        "found": {name: dict(of_server.counts) for name, of_server in found.items()},
    }
    harness.publish(report, args.out / "mixed_traffic.json")
    if any(of_server.faults for of_server in found.values()):
        raise SystemExit("red: see above")


if __name__ == "__main__":
    main()
