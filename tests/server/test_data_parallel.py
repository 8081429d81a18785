"""Two engines behind one address: experts spread over both, requests over either."""

import os
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import HANGS_S
from tests.server.conftest import CHECKPOINT, UNCOMPILED, Server, serving

NUM_REQUESTS = 12
CORES = "VLLM_CPU_OMP_THREADS_BIND"
PROMPTS = ("Sort: q d x a", "Add 23 and 41.", "Reverse: rose chair lamp", "Count from 31 to 69.")


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A process that tests beside others has one core (tests/conftest.py); vLLM wants one for each.
    core = os.environ.get(CORES)
    env = {} if core is None else {CORES: f"{core}|{core}"}
    folder = tmp_path_factory.mktemp("two-engines")
    with serving(CHECKPOINT, folder, *UNCOMPILED, "--data-parallel-size", "2", env=env) as it:
        yield it


def answer(server: Server, number: int) -> str:
    completion = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
        seed=number,
        max_tokens=128,
    )
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


def test_both_engines_answer(two_engines: Server) -> None:
    before = finished_by_engine(two_engines)
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        list(clients.map(lambda n: answer(two_engines, n), range(NUM_REQUESTS)))
    since = finished_by_engine(two_engines) - before
    assert since.keys() == {"0", "1"}
    assert since.total() == NUM_REQUESTS


def finished_by_engine(server: Server) -> Counter[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=HANGS_S) as page:
        families = text_string_to_metric_families(page.read().decode())
        finished = [f for f in families if f.name == "vllm:request_success"]
    found: Counter[str] = Counter()
    for sample in finished[0].samples:
        if sample.name.endswith("_total"):
            found[sample.labels["engine"]] += int(sample.value)
    return found
