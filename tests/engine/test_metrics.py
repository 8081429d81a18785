"""The metrics count what the trace shows, also with commits of their own and for masked models."""

import itertools
import json
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams

from tests.engine.conftest import Engine, GetEngine, GetTiny
from tests.engine.drafters import ask, drafting, started
from tests.engine.masked import make_checkpoint
from tests.engine.one_step import FEW_STEPS, random_ids
from tests.metrics import Samples, check_against, check_histogram, ours, since

CANVAS = 32

STEPS = FEW_STEPS["diffusion_max_steps"]


def scrape() -> Samples:
    return ours(generate_latest(REGISTRY).decode())


def run(served: Engine, params: SamplingParams, lengths: list[int]) -> tuple[Any, dict[str, float]]:
    """What the trace and the metrics say of random prompts of these lengths, all at once."""
    seen = len(served.trace.read_text()) if served.trace.exists() else 0
    before = scrape()
    prompts = [random_ids(n, 512, seed=n) for n in lengths]
    served.ask(prompts, params)
    trace = [json.loads(line) for line in served.trace.read_text()[seen:].splitlines()]
    return trace, since(before, scrape())


def test_several_at_once(engine: GetEngine, tiny: GetTiny) -> None:
    """One ends where the context does."""
    served = engine(tiny(64), settings={"fit_canvas": True}, disable_log_stats=False)
    top_k = {"diffusion_acceptance": "top_k", "diffusion_accept_tokens": 8}
    params = SamplingParams(max_tokens=CANVAS, ignore_eos=True, extra_args=top_k)
    trace, changed = run(served, params, [40, 5, 2048 - CANVAS])
    check_against(trace, changed)
    assert changed["requests_total top_k"] == 3
    finished = {k: v for k, v in changed.items() if k.startswith("canvases_finished_total")}
    assert finished["canvases_finished_total revealed"] > 0 and sum(finished.values()) == 3
    assert "canvases_cut_total" not in changed


@pytest.mark.parametrize("commits_last", [False, True])
def test_commits_of_their_own(
    engine: GetEngine, tiny: GetTiny, asynchronous: None, commits_last: bool
) -> None:
    """The step that is on its way when a request ends is counted with the next request."""
    settings = {"commit_last_block": commits_last}
    served = engine(tiny(64), settings=settings, async_scheduling=True, disable_log_stats=False)
    params = SamplingParams(max_tokens=3 * CANVAS, ignore_eos=True, extra_args=FEW_STEPS)
    trace, changed = run(served, params, [40])
    late, on_its_way = trace[: 3 * STEPS], trace[3 * STEPS :]
    check_against(late, changed)
    assert len(on_its_way) == 1 and not on_its_way[0]["finished"]
    assert changed["commits_total own"] == 2 + commits_last
    assert changed.get("commits_total none", 0) == 1 - commits_last
    assert changed["forwards_total"] == 3 * STEPS + 2 + commits_last


@pytest.mark.parametrize("edits", [False, True], ids=["revealed", "edited"])
def test_masked(engine: GetEngine, tmp_path_factory: Any, edits: bool) -> None:
    block = 4
    checkpoint, _ = make_checkpoint(tmp_path_factory.mktemp("masked"), block)
    served = engine(checkpoint, settings={"fit_canvas": True}, disable_log_stats=False)
    extra = {"diffusion_edit_probability": 0.3, "diffusion_edit_steps": 3} if edits else None
    params = SamplingParams(max_tokens=3 * block, ignore_eos=True, extra_args=extra)
    trace, changed = run(served, params, [1, block, 3 * block + 1])
    check_against(trace, changed)
    assert changed["requests_total confidence"] == 3
    last = [line for line in trace if line["finished"]]
    assert changed["canvases_finished_total revealed"] == len(last)
    by_request = itertools.groupby(
        sorted(trace, key=lambda line: line["request_id"]), lambda line: line["request_id"]
    )
    steps = [list(lines) for _, lines in by_request]
    unchanged = sum(
        step["finished"]
        and before["accepted"] == step["accepted"]
        and before["canvas"] == step["canvas"]
        for lines in steps
        for before, step in itertools.pairwise(lines[:-1])
    )
    assert bool(unchanged) == edits
    assert changed["commits_total none"] == len(steps) + unchanged  # their last blocks, and these


def test_drafts() -> None:
    """Of different widths: fewer requests share the rows of a step as they end."""
    options = drafting({"width_policy": "load", "load_rows": 40}, disable_log_stats=False)
    prompts = [random_ids(20, 512, seed=i) for i in range(5)]
    sampling = [
        {"temperature": 0.0, "max_tokens": 12 * (i + 1), "ignore_eos": True} for i in range(5)
    ]
    with started(options) as llm:
        before = scrape()
        found = ask(llm, prompts, sampling)
        changed = since(before, scrape())
    widths = [width for verified in found.verified for _, width in verified]
    assert len(set(widths)) > 2
    check_histogram("draft_width", widths, changed)
    check_histogram("acceptance_length", [n for e in found.emitted for n in e], changed)
    assert changed["draft_width_count"] == changed["acceptance_length_count"] == len(widths)


def test_nothing_is_counted_without_statistics(engine: GetEngine, tiny: GetTiny) -> None:
    served = engine(tiny(64), disable_log_stats=True)
    params = SamplingParams(max_tokens=CANVAS, ignore_eos=True, extra_args=FEW_STEPS)
    before = scrape()
    served.ask([[5, 6, 7]], params)
    assert scrape() == before and not served.runner.sampler.step.requests.are_counted
