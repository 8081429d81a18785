"""`/metrics` of a server says what the trace of every step says."""

import json
import re
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.metrics import check_against, ours, since
from tests.paths import ROOT
from tests.server.conftest import MAX_MODEL_LEN, Server
from tests.server.dashboard_queries import queries
from vllm_dllm.metrics.prometheus import BY_LABEL, COUNTERS, HISTOGRAMS, PREFIX

DASHBOARD = ROOT / "docs" / "dashboard.json"
QUESTIONS = ("Reverse: rose chair lamp", "Sort: q d x a", "Count from 31 to 69.")


def scrape(server: Server, accept: str = "text/plain") -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": accept}
    )
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()


def ask(server: Server, prompt: Any, max_tokens: int, **extra: Any) -> int:
    """Tokens of the answer."""
    answer = server.client.completions.create(
        model=server.model,
        prompt=prompt,
        max_tokens=max_tokens,
        seed=1,
        extra_body={"vllm_xargs": extra},
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


def test_what_a_trace_counts(server: Server) -> None:
    """Answers one after the other, so that a forward holds one canvas."""
    seen = len(server.trace.read_text()) if server.trace.exists() else 0
    before = ours(scrape(server))
    for question in QUESTIONS:
        ask(server, question, 128)
    ask(server, QUESTIONS[0], 64, diffusion_acceptance="confidence")
    ask(server, QUESTIONS[1], 64, diffusion_max_steps=1)
    ask(server, [5] * (MAX_MODEL_LEN - 20), 20, diffusion_max_steps=2)
    trace = [json.loads(line) for line in server.trace.read_text()[seen:].splitlines()]
    changed = since(before, ours(scrape(server)))
    check_against(trace, changed)
    assert changed["forwards_total"] == len(trace)
    assert changed["requests_total entropy_bound"] == 5
    assert changed["requests_total confidence"] == 1
    assert changed["canvases_finished_total converged"] >= 3
    assert changed["canvases_finished_total step_cap"] >= 2
    assert changed["canvases_finished_total revealed"] >= 1
    assert changed["canvases_cut_total"] == 1
    blocks = sum(line["finished"] for line in trace)
    assert changed["commits_total none"] == len(QUESTIONS) + 3
    assert changed["commits_total shared"] == blocks - len(QUESTIONS) - 3 > 0
    assert "commits_total own" not in changed


@pytest.mark.parametrize("name", [*COUNTERS, *BY_LABEL, *HISTOGRAMS])
def test_openmetrics(server: Server, name: str) -> None:
    """A strict parser reads all of it, and each metric is there, with its definition."""
    text = scrape(server, "application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in openmetrics(text)}
    definitions = COUNTERS | {key: value[-1] for key, value in BY_LABEL.items()}
    definitions |= {key: value[0] for key, value in HISTOGRAMS.items()}
    assert families[PREFIX + name].documentation == definitions[name]
    assert families[PREFIX + name].samples


def test_the_dashboard_asks_for_what_there_is(server: Server) -> None:
    """Each metric of its queries, and each label on one of them."""
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scrape(server)):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    found = [query for query in queries(DASHBOARD) if not query.needs_drafter]
    for query in found:
        assert query.metrics <= samples.keys(), query.panel
        assert query.labels <= set().union(*(samples[m] for m in query.metrics)), query.panel
    names = {f"{PREFIX}{name}" for name in HISTOGRAMS}
    names |= {f"{PREFIX}{name}_total" for name in (*COUNTERS, *BY_LABEL)}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for q in found for name in q.metrics}
    assert names <= shown


def test_top(server: Server) -> None:
    """One frame, as a user sees it."""
    ask(server, QUESTIONS[0], 64)
    command = [sys.executable, "-m", "vllm_dllm", "top", "--once"]
    url = f"http://127.0.0.1:{server.port}"
    done = subprocess.run([*command, "--url", url], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"Requests +0 running, 0 waiting", done.stdout)
    assert re.search(r"Denoise steps per block +– +\d+\.\d\d\n", done.stdout)
