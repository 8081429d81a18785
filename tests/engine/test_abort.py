"""An aborted request has no part in the step after."""

from vllm import SamplingParams

from tests.engine.conftest import GetEngine, GetTiny


def test_no_step_after_an_abort(tiny: GetTiny, engine: GetEngine) -> None:
    served = engine(tiny(16))
    core = served.llm.llm_engine
    params = SamplingParams(max_tokens=96, ignore_eos=True, seed=1)
    for name in ("stays", "leaves"):
        core.add_request(name, {"prompt_token_ids": [5, 6, 7]}, params)
    for _ in range(4):
        core.step()
    steps_so_far = len(served.steps("leaves"))
    assert steps_so_far == len(served.steps("stays")) > 0
    core.abort_request(["leaves"])
    for _ in range(3):
        core.step()
    assert len(served.steps("stays")) == steps_so_far + 3
    assert len(served.steps("leaves")) == steps_so_far
    core.abort_request(["stays"])
    while core.has_unfinished_requests():
        core.step()
