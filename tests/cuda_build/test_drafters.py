"""A drafter's context goes to the caches that are there, not to those that vLLM profiled with."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda_build import chores
from tests.cuda_build.engine import Report
from tests.cuda_build.machine import H100
from tests.cuda_build.test_start import require_no_waits

POLICIES: dict[str, dict[str, Any]] = {"fixed": {}}
PROMPTS = {
    "one": {"prompt": 9, "max_tokens": 30, "temperature": 0.0},
    "another": {"prompt": 300, "max_tokens": 30, "temperature": 0.0},
    "a third": {"prompt": 17, "max_tokens": 30, "temperature": 1.0},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_context_goes_to_the_caches_that_are_there(
    on_host: Callable[..., Report], policy: str
) -> None:
    report = on_host(H100, chores.draft, drafter=POLICIES[policy], requests=PROMPTS, options={})
    require_no_waits(report)
    assert report.tokens == {"one": 30, "another": 30, "a third": 30}
    assert report.facts["caches written"] == report.facts["caches of layers"]
    assert report.facts["caches"] == 2, "one to profile with, one to serve with"
