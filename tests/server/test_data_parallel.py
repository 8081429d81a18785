"""Two engines: experts spread over both, requests over either."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.metrics import by_engine, check_against, since
from tests.paths import ROOT
from tests.processes import HANGS_S
from tests.server.conftest import (
    CHECKPOINT,
    KEY,
    UNCOMPILED,
    WATCHED,
    Server,
    free_port,
    serving,
    start_tracing,
    stop,
    wait_until_ready,
)
from tests.server.watching import CANVASES, watch

NUM_REQUESTS = 12
CORES = "VLLM_CPU_OMP_THREADS_BIND"
PROMPTS = ("Sort: q d x a", "Add 23 and 41.", "Reverse: rose chair lamp", "Count from 31 to 69.")
KEYS = (KEY, "another")
WORDS = "rose chair lamp sand seed cherry eagle fox bridge cloud"
LONG = (f"Reverse: {' '.join([WORDS] * 8)}", f"Sort: {' '.join('qdxaornizlv' * 16)}")


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two-engines")
    options = (*UNCOMPILED, "--data-parallel-size", "2", "--api-key", *KEYS)
    with serving(CHECKPOINT, folder, *options, env=cores() | WATCHED) as it:
        yield it


def cores() -> dict[str, str]:
    """A process that tests beside others has one core (tests/conftest.py); vLLM wants one for each
    engine."""
    core = os.environ.get(CORES)
    return {} if core is None else {CORES: f"{core}|{core}"}


def answer(server: Server, number: int, rank: int | None = None) -> str:
    """`rank`: of the engine that answers. None: whichever vLLM chooses."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    question = PROMPTS[number % len(PROMPTS)]
    completion = server.chat(question, seed=number, max_tokens=128, extra_headers=headers)
    text = completion.choices[0].message.content
    assert text
    return text


def test_answers_are_those_of_one_engine(server: Server, two_engines: Server) -> None:
    """One at a time, the other engine keeps step without a request of its own; all at once, both
    have some, of different lengths."""
    expected = [answer(server, number) for number in range(NUM_REQUESTS)]
    assert [answer(two_engines, number) for number in range(4)] == expected[:4]
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        found = list(clients.map(lambda n: answer(two_engines, n), range(NUM_REQUESTS)))
    assert found == expected


def test_two_keys(two_engines: Server) -> None:
    """Whose requests share the steps of an engine: each has what it has alone, nothing of the
    other's."""
    alone = [watch(two_engines, LONG[i], f"alone-{i}", KEYS[i]) for i in range(2)]
    tokens = [{tuple(canvas["tokens"]) for canvas in canvases} for _, canvases in alone]
    assert len(tokens[0]) > 1 < len(tokens[1]) and not tokens[0] & tokens[1]

    def ask(number: int) -> Any:
        i = number % 2
        return watch(two_engines, LONG[i], f"key-{i}-{number}", KEYS[i], rank=number // 2 % 2)

    seen = len(two_engines.trace.read_text())
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        for number, found in enumerate(clients.map(ask, range(NUM_REQUESTS))):
            assert found == alone[number % 2]
    steps = map(json.loads, two_engines.trace.read_text()[seen:].splitlines())
    order = [step["request_id"].split("-")[2] for step in steps]
    assert sorted(order) != order != sorted(order, reverse=True), "one key after the other"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer third"}, {"X-API-Key": KEYS[0]}], ids=str
)
def test_without_a_key(two_engines: Server, headers: dict[str, str]) -> None:
    """No canvas and no answer, but where docs/security.md says so."""
    page = (ROOT / "docs" / "security.md").read_text()
    _, _, said = page.partition("without the key:")
    documented = set(re.findall("`(/.*?)`", said.partition("\n\n")[0]))
    asked = {
        "prompt": [5],
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "stream": True,
        "vllm_xargs": CANVASES,
    }
    url = f"http://127.0.0.1:{two_engines.port}"
    with httpx.Client(base_url=url, headers=headers, timeout=HANGS_S) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            refused = client.post(path, json=asked)
            assert refused.status_code == 401 and "canvas" not in refused.text
        refused = client.post("/invocations", json=asked)
        assert "is for streams of /v1/completions" in refused.text
        assert "vllm_dllm.canvas" not in refused.text
        # Whether a route wants the key is decided before whether it wants another method.
        routes = (*client.get("/openapi.json").json()["paths"], "/openapi.json", "/docs", "/redoc")
        answered = {path for path in routes if client.get(path).status_code != 401}
        pages = ("/canvas", "/canvas/canvas.js", "/metrics")
        assert [client.get(path, follow_redirects=True).status_code for path in pages] == [200] * 3
    assert answered | {"/canvas", "/metrics"} == documented


def test_metrics_of_each_engine(two_engines: Server) -> None:
    """Both at once; the trace of both engines is one file."""
    seen = len(two_engines.trace.read_text())
    before = by_engine(two_engines.read("/metrics"))
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        list(clients.map(lambda n: answer(two_engines, n, rank=n % 3 // 2), range(NUM_REQUESTS)))
    lines = [json.loads(line) for line in two_engines.trace.read_text()[seen:].splitlines()]
    now = by_engine(two_engines.read("/metrics"))
    assert now.keys() == {"0", "1"}
    changed = {engine: since(before[engine], now[engine]) for engine in now}
    assert [changed[engine]["requests_total entropy_bound"] for engine in "01"] == [8, 4]
    check_against(lines, Counter(changed["0"]) + Counter(changed["1"]))
    for counted in changed.values():
        assert 0 < counted["forwards_total"] <= counted["denoise_steps_total"] < len(lines)
    for engine in "01":
        peak, bound = (
            now[engine][f"sampling_memory_{name}_bytes", frozenset()] for name in ("peak", "bound")
        )
        assert 0 < peak <= bound


@pytest.mark.thorough
def test_a_server_for_each_engine(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For a balancer in front of them: two addresses, and each has its engine's metrics. And whole
    experts on each of them; above, each engine has a part of every expert."""
    group = (
        *("--enable-expert-parallel", "--data-parallel-size", "2"),
        *("--data-parallel-address", "127.0.0.1"),
        *("--data-parallel-rpc-port", str(free_port())),
    )
    started = []
    with ExitStack() as ending:
        for rank in "01":
            options = (*UNCOMPILED, *group, "--data-parallel-rank", rank)
            folder = tmp_path_factory.mktemp(f"engine-{rank}")
            started.append(start_tracing(CHECKPOINT, folder, *options, env=cores()))
            ending.callback(stop, started[-1][0])
        for process, one in started:
            wait_until_ready(process, one)
        servers = [one for _, one in started]
        expected = [answer(server, number) for number in range(4)]
        assert [answer(one, number) for number in range(2) for one in servers] == [
            expected[number] for number in range(2) for _ in servers
        ]
        with ThreadPoolExecutor() as clients:
            found = clients.map(lambda n: answer(servers[n % 2], n), range(4))
        assert list(found) == expected
        for rank, one in zip("01", servers, strict=True):
            lines = [json.loads(line) for line in one.trace.read_text().splitlines()]
            counted = by_engine(one.read("/metrics"))
            assert counted.keys() == {rank}
            check_against(lines, since(Counter(), counted[rank]))
