"""What watched canvases cost a step.

    python -m bench.watching

Ten clients stream answers at once; in every third wave all of them watch their canvases, in another
one nobody does, and the third goes to a server that was started without the plugin. A step's time
is what `/metrics` says of blocks and their steps. Clients and server share the machine's cores;
with `--apart`, the model computes on the first core and everything else is on the others, as it is
beside a GPU. See bench/README.md.
"""

import argparse
import http.client
import json
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness
from bench.clients import PATIENCE_S, serving
from vllm_dllm.config.canvas_feeds import PLUGIN, PLUGINS_VARIABLE
from vllm_dllm.requests.options import STREAM_CANVASES
from vllm_dllm.tools.scrape import Change, scrape_canvases
from vllm_dllm.tools.server_process import HOST, Server

WATCHERS = 10
GOAL_PERCENT = 2.0
STEPS = 16  # of each block
BLOCKS = 8
CANVAS = 64
CORES = "VLLM_CPU_OMP_THREADS_BIND"
CASES = {"no plugin": (0, False), "nobody watches": (1, False), "all watch": (1, True)}
"""Which server is asked, and whether its clients watch."""


class Streamed(NamedTuple):
    answer: str
    num_canvases: int


def body(client: int, watches: bool, num_blocks: int = BLOCKS) -> dict[str, Any]:
    """No canvas is finished before its last step, so all waves have the same work."""
    extra = {"diffusion_max_steps": STEPS, "diffusion_stability_threshold": STEPS}
    extra |= {STREAM_CANVASES: True} if watches else {}
    asked = {"prompt": [5 + client, 30, 7], "max_tokens": num_blocks * CANVAS, "ignore_eos": True}
    return asked | {"seed": client, "stream": True, "vllm_xargs": extra}


def ask(server: Server, model: Path, asked: dict[str, Any]) -> bytes:
    """The whole stream. It is read at once and looked at later."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=PATIENCE_S)
    try:
        text = json.dumps({"model": str(model), **asked})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        stream = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise harness.Refused(f"HTTP {response.status}: {stream.decode()}")
    return stream


def parse(stream: bytes) -> Streamed:
    lines = stream.decode().splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line[:7] == "data: {"]
    answer = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    return Streamed(answer, sum("canvas" in chunk for chunk in chunks))


def check(servers: list[Server], model: Path) -> None:
    """A watcher has the answer of everybody else, and canvases; nobody else has any. One request at
    a time, since in a batch rounding may part two answers."""
    for client in range(WATCHERS):
        found = {
            case: parse(ask(servers[index], model, body(client, watches, num_blocks=2)))
            for case, (index, watches) in CASES.items()
        }
        answers = {streamed.answer for streamed in found.values()}
        watching = [case for case, streamed in found.items() if streamed.num_canvases]
        if len(answers) > 1 or watching != ["all watch"]:
            raise harness.Refused(f"answers differ, or canvases came to {watching}: {found}.")


def wave(server: Server, model: Path, watches: bool) -> dict[str, float]:
    """All clients at once, one answer each."""
    url = f"http://{HOST}:{server.port}"
    ask(server, model, body(0, watches, num_blocks=1))  # it has just been woken
    before = scrape_canvases(url)
    with ThreadPoolExecutor(WATCHERS) as clients:
        asked = [body(client, watches) for client in range(WATCHERS)]
        streams = list(clients.map(lambda each: ask(server, model, each), asked))
    change = Change(before, scrape_canvases(url))
    steps = change.difference("vllm_dllm:block_denoise_steps_sum")
    canvases = sum(parse(stream).num_canvases for stream in streams)
    if steps != WATCHERS * BLOCKS * STEPS or bool(canvases) != watches:
        raise harness.Refused(f"a wave had {steps:g} steps, and {canvases} canvases were seen.")
    return {
        "step_ms": 1000 * change.difference("vllm_dllm:block_seconds_sum") / steps,
        "canvases_seen": canvases / steps,
    }


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """At all other times it is stopped."""
    os.killpg(server.pid, signal.SIGCONT)
    try:
        yield server
    finally:
        os.killpg(server.pid, signal.SIGSTOP)


@contextmanager
def started(model: Path, environment: Mapping[str, str]) -> Iterator[list[Server]]:
    """Without the plugin and with it, stopped."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(model, environment=settings))
            for settings in (environment, {**environment, PLUGINS_VARIABLE: PLUGIN})
        ]
        check(servers, model)
        for server in servers:
            os.killpg(server.pid, signal.SIGSTOP)
            stack.callback(os.killpg, server.pid, signal.SIGCONT)  # it must run to be ended
        yield servers


def measure(
    model: Path, rounds: int, environment: Mapping[str, str]
) -> dict[str, list[dict[str, float]]]:
    """By case, one wave for each round."""
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with started(model, environment) as servers:
        for number in range(rounds + 1):
            first = number % len(CASES)
            for case in (list(CASES) * 2)[first : first + len(CASES)]:
                index, watches = CASES[case]
                with running(servers[index]) as server:
                    found[case].append(wave(server, model, watches))
            print({case: round(waves[-1]["step_ms"], 2) for case, waves in found.items()})
    return {case: waves[1:] for case, waves in found.items()}  # the first one warms up


def percents(found: dict[str, list[dict[str, float]]], case: str, base: str) -> list[float]:
    """How much longer a step of `case` takes than one of `base`, round by round."""
    pairs = zip(found[case], found[base], strict=True)
    return [100 * (one["step_ms"] / other["step_ms"] - 1) for one, other in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/diffusiongemma-tiny"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--apart", action="store_true", help="the model has a core of its own")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine, cores = harness.machine(), sorted(os.sched_getaffinity(0))
    environment = {CORES: str(cores[0])} if args.apart else {}
    try:
        if args.apart:
            os.sched_setaffinity(0, set(cores[1:]))  # servers inherit it; their workers do not
        found = measure(args.checkpoint, args.rounds, environment)
    finally:
        os.sched_setaffinity(0, set(cores))
    percent = {
        "watching": harness.spread(percents(found, "all watch", "nobody watches")),
        "the plugin": harness.spread(percents(found, "nobody watches", "no plugin")),
    }
    for what, of_rounds in percent.items():
        low, high = of_rounds["min"], of_rounds["max"]
        print(f"{what}: {of_rounds['median']:+.1f}% a step ({low:+.1f} to {high:+.1f})")
    report = {
        "bench": "watching",
        "machine": machine,
        "apart": args.apart,
        "watchers": WATCHERS,
        "cases": {
            case: {name: harness.spread([wave[name] for wave in waves]) for name in waves[0]}
            for case, waves in found.items()
        },
        "percent": percent,
        "goal_percent": GOAL_PERCENT,
        "goal_met": percent["watching"]["median"] <= GOAL_PERCENT,
    }
    name = "watching_apart.json" if args.apart else "watching.json"
    harness.publish(report, args.out / name)


if __name__ == "__main__":
    main()
