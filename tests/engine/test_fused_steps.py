"""Steps in few launches, as a GPU takes them, in whole answers and with asynchronous scheduling,
which is a GPU's default: the host does not know yet where a canvas begins.

Triton's interpreter runs the kernels. What the same engine answers step by step in PyTorch's
operations is the definition.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from attention_kernels.interpreter import interpret_kernels
from tests.engine.conftest import Engine
from tests.engine.one_step import FEW_STEPS, random_ids
from tests.engine.test_scheduling import Answer, answer_of
from tests.engines import asynchronous_scheduling
from vllm_dllm.denoise import draws_triton
from vllm_dllm.step.uniform import settle_triton
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


class Steps(NamedTuple):
    step: UniformStep
    taken: Counter[str]  # by the name of the method that took them


@pytest.fixture(scope="module")
def served(engine: Callable[..., Engine], tiny: Callable[[int], Path]) -> Iterator[Engine]:
    interpret_kernels(draws_triton, settle_triton)
    with asynchronous_scheduling():
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
    count("_advance")
    return Steps(step, taken)


def in_operations(step: UniformStep) -> Any:
    """Self-conditioning as PyTorch adds up its norms: to the bit the kernels' do not."""
    condition = step.condition

    def conditioned(plain: torch.Tensor, out: torch.Tensor) -> None:
        step.fuses = False
        condition(plain, out)
        step.fuses = True

    return conditioned


def answers_of(engine: Engine, params: list[SamplingParams]) -> list[Answer]:
    # There is room for three canvases and a narrow one.
    prompts = [
        {"prompt_token_ids": random_ids(CONTEXT - 3 * CANVAS - 10 + i, 512, seed=i)}
        for i in range(len(params))
    ]
    return list(map(answer_of, engine.llm.generate(prompts, params, use_tqdm=False)))


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
    assert set(steps.taken) == {"_advance"}
    steps.taken.clear()
    monkeypatch.setattr(steps.step, "fuses", True)
    monkeypatch.setattr(steps.step, "condition", in_operations(steps.step))
    assert answers_of(served, params) == expected
    assert set(steps.taken) == {"_advance_plain"}
