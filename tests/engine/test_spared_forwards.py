"""A prompt shares its first canvas' forward, a commit the next canvas', and the last canvas is not
committed. An aborted request has no part in the step after."""

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, GetEngine, GetTiny, cached_tokens, tokens_of
from tests.engine.one_step import FEW_STEPS, random_ids
from vllm_dllm.compat.usage import pop_step_counts

CANVAS = 32
COUNTED = {"worker_extension_cls": "bench.step_split.StepSplit", "enable_prefix_caching": False}


def forwards_of(
    served: Engine, prompt_length: int, blocks: int, steps_on_their_way: int = 0
) -> int:
    params = SamplingParams(max_tokens=CANVAS * blocks, ignore_eos=True, extra_args=FEW_STEPS)
    before = served.llm.collective_rpc("num_forwards")[0]
    (output,) = served.ask([random_ids(prompt_length, 512, seed=1)], params)
    assert len(output.outputs[0].token_ids) == params.max_tokens
    steps = blocks * FEW_STEPS["diffusion_max_steps"] + steps_on_their_way
    assert len(served.steps(output.request_id)) == steps
    return served.llm.collective_rpc("num_forwards")[0] - before


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_forwards_of_an_answer(engine: GetEngine, tiny: GetTiny, blocks: int) -> None:
    served = engine(tiny(64), **COUNTED)
    steps = FEW_STEPS["diffusion_max_steps"]
    assert forwards_of(served, 40, blocks) == blocks * steps


def test_no_step_after_an_abort(tiny: GetTiny, engine: GetEngine) -> None:
    served = engine(tiny(64), **COUNTED)
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


@pytest.mark.parametrize("blocks", [1, 3])
def test_forwards_with_asynchronous_scheduling(
    engine: GetEngine, tiny: GetTiny, asynchronous: None, blocks: int
) -> None:
    """A commit between two blocks, and at the end a step that was on its way."""
    served = engine(tiny(64), async_scheduling=True, **COUNTED)
    steps = FEW_STEPS["diffusion_max_steps"]
    assert forwards_of(served, 40, blocks, steps_on_their_way=1) == blocks * steps + blocks


@pytest.mark.parametrize(("room", "ahead"), [(0, 0), (1, 0), (CANVAS - 1, 0), (CANVAS, 1)])
def test_no_step_is_scheduled_ahead_and_repeated_at_the_end_of_the_context(
    engine: GetEngine,
    tiny: GetTiny,
    asynchronous: None,
    room: int,  # tokens, behind the answer
    ahead: int,
) -> None:
    served = engine(tiny(64), async_scheduling=True, **COUNTED)
    length = served.llm.llm_engine.model_config.max_model_len - room - 2 * CANVAS
    steps = FEW_STEPS["diffusion_max_steps"]
    # A commit lies between the two blocks.
    assert forwards_of(served, length, 2, steps_on_their_way=ahead) == 2 * steps + 1 + ahead


@pytest.mark.parametrize("commits_last", [False, True])
def test_a_stop_that_cannot_be_foreseen_is_not_committed(
    engine: GetEngine, tiny: GetTiny, commits_last: bool
) -> None:
    """Nor is its block found in the prefix cache, which has a denoising step's keys and values."""
    options = {
        **COUNTED,
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": None,
        "block_size": CANVAS,
    }
    served = engine(tiny(64), settings={"commit_last_block": commits_last}, **options)
    steps = FEW_STEPS["diffusion_max_steps"]
    forwards = 2 * steps + commits_last
    assert forwards_of(served, 96, 2) == forwards

    prompt = random_ids(64, 512, seed=1)
    assert served.llm.reset_prefix_cache()
    text = SamplingParams(max_tokens=2 * CANVAS, ignore_eos=True, seed=0, extra_args=FEW_STEPS)
    token_ids = tokens_of(*served.ask([prompt], text))
    assert served.llm.reset_prefix_cache()
    token = next(t for t in token_ids[CANVAS:] if t not in token_ids[:CANVAS])
    unused = [t for t in range(512) if t not in token_ids]
    many = SamplingParams(
        max_tokens=3 * CANVAS, seed=0, stop_token_ids=[token, *unused][:20], extra_args=FEW_STEPS
    )
    before = served.llm.collective_rpc("num_forwards")[0]
    stopped = tokens_of(*served.ask([prompt], many))
    assert stopped == token_ids[: token_ids.index(token) + 1]
    assert served.llm.collective_rpc("num_forwards")[0] - before == 2 * steps
    assert cached_tokens(served, [*prompt, *token_ids, 1]) == len(prompt) + CANVAS


def test_a_prompt_that_fills_the_token_budget_is_prefilled_alone(
    engine: GetEngine, tiny: GetTiny
) -> None:
    served = engine(tiny(64), max_num_batched_tokens=96, **COUNTED)
    steps = FEW_STEPS["diffusion_max_steps"]
    assert forwards_of(served, 96 - CANVAS, 1) == steps
    assert forwards_of(served, 96 - CANVAS + 1, 1) == 1 + steps
    assert forwards_of(served, 2 * 96 - CANVAS, 1) == 1 + steps


def test_the_last_canvas_is_as_wide_as_what_may_still_come(
    engine: GetEngine, tiny: GetTiny, is_ahead: bool
) -> None:
    """Also where the step after a block was scheduled before its end was known."""
    options = {"async_scheduling": is_ahead, "disable_log_stats": False}
    served = engine(tiny(64), settings={"fit_canvas": True}, **options, **COUNTED)

    def widths(max_tokens: int, **extra: int) -> list[int]:
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={**FEW_STEPS, **extra}
        )
        (output,) = served.ask([random_ids(40, 512, seed=1)], params)
        assert len(output.outputs[0].token_ids) == max_tokens
        traced, counted = served.steps(output.request_id), pop_step_counts(output.outputs[0])
        assert counted is not None and counted.denoise_steps == len(traced)
        # Scheduled ahead, some blocks are committed by forwards of their own.
        num_commits = counted.forwards - len(traced)
        assert is_ahead <= num_commits <= is_ahead * sum(step["finished"] for step in traced)
        return [len(step["canvas"]) for step in traced]

    steps = FEW_STEPS["diffusion_max_steps"]
    assert widths(CANVAS + 1) == [CANVAS] * steps + [16] * steps
    assert widths(2 * CANVAS - 1) == [CANVAS] * 2 * steps
    assert widths(CANVAS + 1, diffusion_canvas_length=CANVAS) == [CANVAS] * 2 * steps
