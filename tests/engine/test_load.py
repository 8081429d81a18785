"""A busy server finishes canvases sooner, of those requests that allow it and of no others."""

import json
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.engine.conftest import HELD_OUT, TRAINED, Engine, GetEngine

ROWS = [json.loads(line) for line in HELD_OUT.read_text().splitlines()][::60]
STAGES = [{"canvases": 3, "stability_threshold": 0, "confidence_threshold": 0.01}]
ALLOWS = {"diffusion_load_stages": 1}

Answers = list[tuple[str, list[list[int]]]]
"""Texts, and the canvas after each step."""


@pytest.fixture(scope="module")
def served(engine: GetEngine) -> Engine:
    settings = {"load_stages": STAGES}
    return engine(Path(TRAINED), settings, diffusion_config={"canvas_length": 64})


def answers(served: Engine, extra_args: list[dict[str, int]], rows: list[int]) -> Answers:
    """To these rows, each with its own extra arguments, in one batch."""
    params = [
        SamplingParams(seed=row, max_tokens=64, extra_args=extra)
        for row, extra in zip(rows, extra_args, strict=True)
    ]
    outputs = served.llm.chat([ROWS[row]["messages"] for row in rows], params, use_tqdm=False)
    return [
        (one.outputs[0].text, [step["canvas"] for step in served.steps(one.request_id)])
        for one in outputs
    ]


def test_who_allows_it_takes_fewer_steps_under_load(served: Engine) -> None:
    rows = list(range(len(ROWS)))
    alone = [answers(served, [ALLOWS], [row])[0] for row in rows]
    plain = answers(served, [{}] * len(rows), rows)
    assert alone == plain  # without load, nothing is looser
    busy = answers(served, [ALLOWS] * len(rows), rows)
    assert [text for text, _ in busy] == [text for text, _ in plain]
    few, many = (sum(len(steps) for _, steps in found) for found in (busy, plain))
    assert few < 0.8 * many


def test_who_does_not_is_left_alone(served: Engine) -> None:
    rows = list(range(len(ROWS)))
    plain = answers(served, [{}] * len(rows), rows)
    mixed = answers(served, [{} if row % 2 else ALLOWS for row in rows], rows)
    assert mixed[1::2] == plain[1::2]
    assert sum(len(steps) for _, steps in mixed[::2]) < sum(len(s) for _, s in plain[::2])
