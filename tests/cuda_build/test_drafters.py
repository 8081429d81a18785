"""Targets with the shipped drafter, under each width policy: no step waits for the GPU."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda_build import chores
from tests.cuda_build.engine import Report
from tests.cuda_build.machine import H100
from tests.cuda_build.test_start import require_no_waits

POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "acceptance": {"width_policy": "acceptance"},
    "acceptance, drafts no wider": {"width_policy": "acceptance", "narrow_draft": True},
    "load": {"width_policy": "load", "load_rows": 20},
    "blockpilot": {"width_policy": "blockpilot"},
}
PROMPTS = {
    "one": {"prompt": 9, "max_tokens": 30, "temperature": 0.0},
    "another": {"prompt": 300, "max_tokens": 30, "temperature": 0.0},
    "a third": {"prompt": 17, "max_tokens": 30, "temperature": 1.0},
    "scored": {"prompt": 17, "max_tokens": 30, "logprob_token_ids": [4, 5]},
}
WIDTHS_READ = "an event at vllm_dllm/drafters/blockpilot.py"
"""What BlockPilot predicts for a request is read once, by the scheduler, with the output of the
step that read its prompt."""


@pytest.mark.parametrize("policy", POLICIES)
def test_no_step_waits(on_host: Callable[..., Report], policy: str) -> None:
    report = on_host(H100, chores.draft, drafter=POLICIES[policy], requests=PROMPTS, options={})
    read = [wait for wait in report.waits if wait.startswith(WIDTHS_READ)]
    assert len(read) == (len(PROMPTS) if policy == "blockpilot" else 0)
    report.waits = [wait for wait in report.waits if wait not in read]
    require_no_waits(report)
    assert report.tokens == dict.fromkeys(PROMPTS, 30)
