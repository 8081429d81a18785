"""Engines of the 26B model's shape start and answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import chores
from tests.cuda_build.engine import Report

NO_COMPILER = {"mode": 0, "cudagraph_mode": "FULL"}
PLAIN = {
    "short": {"prompt": 5, "max_tokens": 20},
    "two canvases": {"prompt": 40, "max_tokens": 400},
    "a prompt in parts": {"prompt": 3000, "max_tokens": 20},
}


@pytest.mark.parametrize("scheme", ["bf16"])
@pytest.mark.parametrize("capability", [(9, 0)], ids="sm_{0[0]}{0[1]}".format)
def test_it_starts_and_answers(
    on_chip: Callable[..., Report], folder: Path, capability: tuple[int, int], scheme: str
) -> None:
    options: dict[str, Any] = {"compilation_config": NO_COMPILER, "max_num_batched_tokens": 2048}
    report = on_chip(
        capability, chores.serve, folder=folder, scheme=scheme, requests=PLAIN, options=options
    )
    require_no_waits(report)
    assert report.compiled_late == [], "requests wait for a compiler"
    assert report.graphs > 0 and report.replays > 0
    assert report.tokens == {"short": 20, "two canvases": 400, "a prompt in parts": 20}


def require_no_waits(report: Report) -> None:
    assert report.waits == [], "the host waits for the device"
    assert report.forbidden == [], "not in a CUDA graph"
    assert report.copies > 0
