"""End to end on the shipped checkpoint: what GPUs attend with gives the answers that CPUs give."""

import pytest
import torch
from vllm import RequestOutput, SamplingParams

from tests.engine.conftest import HELD_OUT, TRAINED, Engine, GetEngine, tokens_of
from tests.engine.rounding import assert_same, decided
from tests.triton_version import interpreted_without_gpu
from vllm_dllm.attention import GPU_BACKEND
from vllm_dllm.compat import attention as vllm_attention

pytestmark = pytest.mark.numerics

ROWS = HELD_OUT[::253]


def answers(served: Engine) -> list[RequestOutput]:
    params = [SamplingParams(max_tokens=256, seed=seed) for seed in range(len(ROWS))]
    return served.llm.chat([row["messages"] for row in ROWS], params, use_tqdm=False)


def attention_of(served: Engine) -> set[str]:
    layers = served.runner.compilation_config.static_forward_context.values()
    return {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}


def test_answers_are_those_of_the_cpu(engine: GetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(TRAINED, max_num_seqs=4)
    assert attention_of(served) == {"CpuCanvasImpl"}
    expected = decided(served.llm, lambda: answers(served), tokens_of)
    interpreted_without_gpu()
    override = vllm_attention.override_cpu_attention_backend
    monkeypatch.setattr(
        vllm_attention, "override_cpu_attention_backend", lambda path: override(GPU_BACKEND)
    )
    # vLLM's write to the cache asks.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    served = engine(TRAINED, max_num_seqs=len(ROWS))
    assert attention_of(served) == {"GpuCanvasImpl"}
    found = answers(served)
    assert_same(found, expected, tokens_of)
    assert [output.outputs[0].text for output in found] == [row["answer"] for row in ROWS]
