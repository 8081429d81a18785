"""Steps in few launches, as a GPU takes them, in whole answers and with asynchronous scheduling,
which is a GPU's default: the host does not know yet where a canvas begins.

Triton's interpreter runs the kernels. What the same engine answers step by step in PyTorch's
operations is the definition.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from attention_kernels.interpreter import interpret_kernels
from tests.engine.conftest import Engine, GetEngine, GetTiny
from tests.engine.one_step import FEW_STEPS, random_ids
from tests.engine.test_scheduling import Answer, answer_of
from tests.engines import asynchronous_scheduling
from tests.recorded_graphs import Recorded, RecordedGraph, capturing
from vllm_dllm.denoise import draws_triton, vocab_stream
from vllm_dllm.step.runner import model_state
from vllm_dllm.step.uniform import settle_triton
from vllm_dllm.step.uniform.step_graphs import StepGraphs
from vllm_dllm.step.uniform.uniform_step import UniformStep

pytestmark = pytest.mark.numerics

CANVAS, CONTEXT = 32, 192
LENGTHS: dict[str, dict[str, Any]] = {
    "one canvas": {"max_tokens": CANVAS},
    "one and a narrow one": {"max_tokens": CANVAS + 6},
    "three canvases": {"max_tokens": 3 * CANVAS},
    "as many as the context holds": {"max_tokens": None},
}
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0, "bad_words": ["lamp", "a", "ab"]},
    "log-probabilities": {"logprobs": 3},
    "log-probabilities of what rules leave": {"logprobs": 0, "logit_bias": {7: 9.0}},
    "stop tokens": {"min_tokens": 20, "stop_token_ids": list(range(0, 512, 9))},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.3, "top_p": 0.9},
}


KERNELS = (
    (draws_triton, "_temperature_and_noise_kernel"),
    (settle_triton, "_settle_kernel"),
    (settle_triton, "_store_soft_kernel"),
)


class Steps(NamedTuple):
    step: UniformStep
    taken: Counter[str]  # by the name of the method that took them


@pytest.fixture(scope="module")
def served(engine: GetEngine, tiny: GetTiny) -> Iterator[Engine]:
    interpret_kernels(draws_triton, settle_triton)
    with pytest.MonkeyPatch.context() as patch, asynchronous_scheduling():
        for module, name in KERNELS:
            patch.setattr(module, name, Recorded(getattr(module, name)))
        yield engine(
            tiny(64),
            settings={"trace_path": None, "fit_canvas": True},
            async_scheduling=True,
            max_model_len=CONTEXT,
        )


@pytest.fixture
def steps(served: Engine, monkeypatch: pytest.MonkeyPatch) -> Steps:
    worker = served.llm.llm_engine.model_executor.driver_worker
    step, taken = worker.model_runner.model_state.step, Counter[str]()

    def count(name: str) -> None:
        take = getattr(step, name)

        def counted(*args: Any) -> Any:
            taken[name] += 1
            return take(*args)

        monkeypatch.setattr(step, name, counted)

    count("_advance_plain")
    count("_denoise_and_settle")
    return Steps(step, taken)


def in_operations(step: UniformStep) -> Any:
    """Self-conditioning as PyTorch adds up its norms: to the bit the kernels' do not."""
    condition = step.condition

    def conditioned(plain: torch.Tensor, batch: Any, out: torch.Tensor) -> None:
        step.fuses = False
        condition(plain, batch, out)
        step.fuses = True

    return conditioned


def answers_of(engine: Engine, params: list[SamplingParams]) -> list[Answer]:
    # There is room for three canvases and a narrow one.
    prompts = [
        {"prompt_token_ids": random_ids(CONTEXT - 3 * CANVAS - 10 + i, 512, seed=i)}
        for i in range(len(params))
    ]
    return list(map(answer_of, engine.ask(prompts, params)))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_step_is_fused(
    served: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch, length: str
) -> None:
    params = [
        SamplingParams(
            seed=i,
            extra_args=FEW_STEPS,
            **{"ignore_eos": "stop_token_ids" not in kind, **LENGTHS[length], **kind},
        )
        for i, kind in enumerate(KINDS.values())
    ]
    expected = answers_of(served, params)
    assert set(steps.taken) == {"_denoise_and_settle"}
    steps.taken.clear()
    monkeypatch.setattr(steps.step, "fuses", True)
    monkeypatch.setattr(steps.step, "condition", in_operations(steps.step))
    assert answers_of(served, params) == expected
    assert set(steps.taken) == {"_advance_plain"}


CAPTURED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "max_tokens": 3 * CANVAS},
    {"temperature": 0.0, "max_tokens": CANVAS + 6},
    {"stop_token_ids": list(range(0, 512, 9)), "ignore_eos": False, "max_tokens": 3 * CANVAS},
    {"extra_args": {**FEW_STEPS, "diffusion_window_rule": "symmetric"}, "max_tokens": 2 * CANVAS},
)


def leave_hidden_states_in_place(
    model: Any, state: Any, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes `model` do what a captured forward does: write its hidden states to one place. Steps
    that are replayed see NaN anywhere else."""
    place = torch.zeros(4 * CANVAS, model.config.hidden_size)
    monkeypatch.setattr(state, "forward_output", lambda: place)
    forward, prepare_attn = model.forward, state.prepare_attn

    def captured_forward(**inputs: Any) -> torch.Tensor:
        hidden = forward(**inputs)
        if step.graphs is None or not step.graphs.can_replay(step.batch):
            return hidden
        place[: len(hidden)] = hidden
        return torch.full_like(hidden, float("nan"))

    def prepare(*args: Any, **kwargs: Any) -> Any:
        made = prepare_attn(*args, **kwargs)
        if step.graphs is not None:
            step.graphs.forward_is_captured = True
        return made

    monkeypatch.setattr(model, "forward", captured_forward)
    monkeypatch.setattr(state, "prepare_attn", prepare)


@pytest.mark.parametrize("forward_is_captured", [False, True])
def test_graphs_are_the_step(
    served: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch, forward_is_captured: bool
) -> None:
    """Whole answers of steps whose launches around the forward are replayed: requests come, leave
    and lie in other slots than those of the capture."""
    runner = served.llm.llm_engine.model_executor.driver_worker.model_runner
    state, step = runner.model_state, steps.step
    monkeypatch.setattr(step, "fuses", True)
    monkeypatch.setattr(step, "condition", in_operations(step))
    monkeypatch.setitem(vars(step.model), "streams_vocabulary", True)
    # On CPUs it is NumPy's, of which a recording knows nothing.
    monkeypatch.setattr(vocab_stream, "argmax", lambda blocks: blocks.argmax(dim=-1))
    params = [
        SamplingParams(seed=i, **{"ignore_eos": True, "extra_args": FEW_STEPS, **kind})
        for i, kind in enumerate(CAPTURED)
    ]
    expected = answers_of(served, params)
    graphs = state.vllm_config.compilation_config
    monkeypatch.setattr(graphs, "max_cudagraph_capture_size", 4 * CANVAS)
    monkeypatch.setattr(model_state, "capture_graphs", capturing)
    if forward_is_captured:
        leave_hidden_states_in_place(runner.model, state, step, monkeypatch)
    with torch.inference_mode():
        state.capture_inner_cudagraphs(runner.input_buffers, None, None, None)
    replays: Counter[int] = Counter()
    try:
        for params_of_some in (params, params[:1]):  # alone, an answer is the same
            steps.taken.clear()
            assert answers_of(served, params_of_some) == expected[: len(params_of_some)]
            for number, captured in step.graphs._captured.items():
                replays[number] += captured.after.num_replays
                assert captured.before.num_replays == captured.after.num_replays
            assert set(steps.taken) == {"_advance_plain"}
    finally:
        state.drop_graphs()
    assert {1, 4} <= set(+replays)
    assert RecordedGraph.recording is None and step.graphs is None


def test_captured_forwards_may_be_smaller_than_a_step() -> None:
    """With `FULL_DECODE_ONLY`, vLLM rounds the user's sizes up to whole canvases, and captures no
    forward that is then larger than the largest size: of 20 and 70 tokens, one of 32."""
    rows: list[int] = []
    forward_output = torch.zeros(CANVAS, 8)
    graphs = StepGraphs(
        2, torch.zeros(1, CANVAS, 8), joins_commits=False, forward_output=forward_output
    )
    graphs.capture(
        lambda run: (None, run()), lambda batch: None, lambda _, hidden: rows.append(len(hidden))
    )
    assert rows == [2 * CANVAS, CANVAS]
