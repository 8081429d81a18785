"""An HTTP request of many answers leaves room in each step, and its answers do not change."""

from contextvars import ContextVar
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, GetEngine, GetTiny
from tests.engine.one_step import FEW_STEPS, random_ids
from vllm_dllm.requests import limits
from vllm_dllm.requests.limits import begin_http_request
from vllm_dllm.scheduling import fair_share

MANY, CANVASES, PLACES = 6, 2, 4
PROMPT = {"prompt_token_ids": random_ids(20, 512, seed=1)}


def params(n: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        n=n, max_tokens=96, ignore_eos=True, seed=3, extra_args=FEW_STEPS, **options
    )


@pytest.fixture
def served(
    engine: GetEngine, tiny: GetTiny, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    monkeypatch.setattr(limits, "_http_request", ContextVar("of this test", default=None))
    monkeypatch.setattr(fair_share, "REMEMBERED_STEPS", 2)  # its answers take few steps
    options = {"async_scheduling": is_ahead, "max_num_seqs": 2 * PLACES}
    return engine(tiny(16), {"limits": {"canvases": CANVASES}}, **options)


def steps_and_answers(served: Engine, late: bool) -> tuple[list[list[str]], dict[str, list[Any]]]:
    """Which requests each step holds, and the tokens of all answers."""
    core, scheduler, done = served.llm.llm_engine, served.scheduler, {}
    steps, stock_schedule = [], scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock_schedule(*args, **kwargs)
        steps.append(list(output.num_scheduled_tokens))
        return output

    def begin(name: str, num_answers: int) -> None:
        begin_http_request()
        core.add_request(name, PROMPT, params(num_answers))

    scheduler.schedule = schedule
    begin("many", MANY)
    for step in range(10**6):
        if late and step == 3:
            begin("late", 1)
        for output in core.step():
            if output.finished:
                done[output.request_id] = [list(one.token_ids) for one in output.outputs]
        if not core.has_unfinished_requests():
            break
    del scheduler.schedule
    return steps, done


def test_a_late_request_shares_each_step(served: Engine) -> None:
    alone, expected = steps_and_answers(served, late=False)
    assert max(map(len, alone)) == PLACES
    steps, answers = steps_and_answers(served, late=True)
    assert answers["many"] == expected["many"]
    own = [i for i, names in enumerate(steps) if any(name.startswith("late") for name in names)]
    # It starts at once, takes part in every step until it is done, and next to few others.
    assert own == list(range(own[0], own[-1] + 1)) and own[0] <= 5
    assert all(len(steps[i]) <= 1 + CANVASES for i in own[1:])
    assert any(len(steps[i]) == 1 + CANVASES for i in own)
    assert len(max(steps[own[-1] + 1 :], key=len)) > CANVASES
