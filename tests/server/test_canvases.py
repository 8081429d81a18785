"""Canvases in their request's own stream, and the page that draws them."""

import json
import re
from typing import Any

import pytest

from tests import tolerances
from tests.paths import ROOT
from tests.server.conftest import Server
from tests.server.watching import CANVASES, watch

DOCS = ROOT / "docs"
QUESTION = "Reverse: sand rose seed cherry eagle fox bridge cloud"


def traced(server: Server, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, server.trace.read_text().splitlines())
    return [line for line in lines if line["request_id"].startswith(f"chatcmpl-{name}-")]


def complete(server: Server, **body: Any) -> str:
    return server.read("/v1/completions", {"model": server.model, **body})


def test_what_is_seen_is_what_was_denoised(server: Server) -> None:
    text, canvases = watch(server, QUESTION, "seen", stream_options={"include_usage": True})
    last = canvases[-1]
    assert last["finished"] and "".join(last["texts"]).strip() == text.strip()
    steps = [(line["step"], line["tokens"], line["accepted"]) for line in traced(server, "seen")]
    assert [(c["step"], c["tokens"], c["accepted"]) for c in canvases] == steps
    for canvas in canvases:
        assert len(canvas["texts"]) == len(canvas["entropy"]) == len(canvas["tokens"])
        mean = sum(canvas["entropy"]) / len(canvas["entropy"])
        assert canvas["mean_entropy"] == pytest.approx(mean, rel=0, abs=tolerances.ROUNDED_ENTROPY)
    assert [c["temperature"] for c in canvases] == sorted(
        (c["temperature"] for c in canvases), reverse=True
    )


def test_the_documented_request(server: Server) -> None:
    text, canvases = watch(server, "Sort: q d x a", "documented")
    assert text == "a d q x"
    page = (DOCS / "canvases.md").read_text()
    fields = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert all(canvas.keys() == fields for canvas in canvases)


def test_the_answer_is_the_same(server: Server) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "seed": 3, "stream": True}

    def chunks(answer: str) -> list[dict[str, Any]]:
        found = [json.loads(line[6:]) for line in answer.splitlines() if line[:7] == "data: {"]
        return [chunk["choices"] for chunk in found if chunk["object"] != "vllm_dllm.canvas"]

    watched = complete(server, **asked, vllm_xargs=CANVASES)
    assert chunks(watched) == chunks(complete(server, **asked))
    assert watched.endswith("data: [DONE]\n\n")
    canvases = [json.loads(e[6:]) for e in watched.split("\n\n") if '"canvas"' in e]
    assert [c["canvas"]["block"] for c in canvases if c["canvas"]["finished"]] == [0, 1]
