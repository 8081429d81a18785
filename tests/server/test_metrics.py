"""`/metrics` of a server says what the trace of every step says."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.metrics import check_against, ours, since
from tests.processes import run
from tests.server.conftest import MAX_MODEL_LEN, Server
from tests.server.dashboard_queries import check, queries
from vllm_dllm.metrics.prometheus import BY_LABEL, COUNTERS, GAUGES, HISTOGRAMS, PREFIX

QUESTIONS = ("Reverse: rose chair lamp", "Sort: q d x a", "Count from 31 to 69.")


def ask(server: Server, question: str, **extra: Any) -> None:
    server.chat(question, max_tokens=128, seed=1, extra_body={"vllm_xargs": extra})


def fill_context(server: Server, max_tokens: int) -> None:
    server.client.completions.create(
        model=server.model,
        prompt=[5] * (MAX_MODEL_LEN - max_tokens),
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True, "vllm_xargs": {"diffusion_max_steps": 2}},
    )


def test_what_a_trace_counts(server: Server) -> None:
    """Answers one after the other, so that a forward holds one canvas."""
    seen = len(server.trace.read_text()) if server.trace.exists() else 0
    before = ours(server.read("/metrics"))
    for question in QUESTIONS:
        ask(server, question)
    ask(server, QUESTIONS[0], diffusion_acceptance="confidence")
    ask(server, QUESTIONS[1], diffusion_max_steps=1)
    fill_context(server, 20)
    trace = [json.loads(line) for line in server.trace.read_text()[seen:].splitlines()]
    changed = since(before, ours(server.read("/metrics")))
    check_against(trace, changed)
    assert changed["forwards_total"] == len(trace)
    assert changed["requests_total entropy_bound"] == 5
    assert changed["requests_total confidence"] == 1
    assert changed["canvases_finished_total converged"] >= 2
    assert changed["canvases_finished_total step_cap"] >= 1
    assert changed["canvases_cut_total"] == 1
    blocks = sum(line["finished"] for line in trace)
    assert changed["commits_total none"] == len(QUESTIONS) + 3
    assert changed["commits_total shared"] == blocks - len(QUESTIONS) - 3 > 0
    assert "commits_total own" not in changed


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_usage_says_what_a_trace_counts(server: Server, streamed: bool) -> None:
    """Of a chat, and of a completion with several answers to several prompts."""
    for of_chat in (True, False):
        seen = len(server.trace.read_text()) if server.trace.exists() else 0
        found = [usage for usage in usages(server, of_chat, streamed) if usage is not None]
        trace = server.trace.read_text()[seen:].splitlines()
        details = found[-1].completion_tokens_details.model_extra
        assert details["denoise_steps"] == details["forwards"] == len(trace)


def test_usage_of_a_batch_of_chats(server: Server) -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:2]]
    body = {"model": server.model, "messages": chats, "max_tokens": 20, "seed": 1}
    answer = json.loads(server.read("/v1/chat/completions/batch", body))
    details = answer["usage"]["completion_tokens_details"]
    assert details["forwards"] >= details["denoise_steps"] > 0


def usages(server: Server, of_chat: bool, streamed: bool) -> Iterator[Any]:
    common: Any = {"max_tokens": 100, "seed": 1, "stream": streamed}
    if streamed:
        common["stream_options"] = {"include_usage": True}
    if of_chat:
        answer = server.chat(QUESTIONS[2], **common)
    else:
        common |= {"model": server.model, "prompt": [QUESTIONS[0], "Sort:"], "n": 2}
        answer = server.client.completions.create(**common)
    for part in answer if streamed else [answer]:
        assert getattr(part, "metrics", None) is None, part.metrics  # vLLM's, of drafts
        yield part.usage


def test_the_dashboard_asks_for_what_there_is(server: Server) -> None:
    shown = check((q for q in queries() if not q.needs_drafter), server.read("/metrics"))
    names = {f"{PREFIX}{name}" for name in (*HISTOGRAMS, *GAUGES)}
    names |= {f"{PREFIX}{name}_total" for name in (*COUNTERS, *BY_LABEL)}
    assert names <= shown


def test_top(server: Server) -> None:
    ask(server, QUESTIONS[1])
    command = [sys.executable, "-m", "vllm_dllm", "top", "--once"]
    url = f"http://127.0.0.1:{server.port}"
    done = run(*command, "--url", url)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"Requests +0 running, 0 waiting", done.stdout)
    assert re.search(r"Denoise steps per block +– +\d+\.\d\d\n", done.stdout)
