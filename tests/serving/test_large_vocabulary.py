"""A vocabulary that is read tile by tile: the answers do not depend on the tiles, nor on how many
processes share it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.serving import reference
from tests.serving.conftest import Engine
from tests.serving.one_step import random_ids
from tests.serving.waits import WATCHED, waits_during
from vllm_dllm.checkpoint.tiny import make_tiny_checkpoint

V, C = 40_960, 32
OPTIONS = {"kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.3, "max_model_len": 256}
# Of each kind: streamed, and such as take whole rows of logits, side by side.
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"top_k": 5, "min_p": 0.01},
    {"temperature": 0.0},
    {"presence_penalty": 1.5, "logit_bias": {77: 20.0}},
    {"extra_args": {"diffusion_canvas_length": 20}},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large-vocabulary")
    return make_tiny_checkpoint(path, vocab_size=V, canvas_length=C)


def decode(engine: Engine) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Tokens and canvases of requests of all kinds, in one batch."""
    params = []
    for seed, kind in enumerate(KINDS):
        # Random weights are chaotic: a last bit of difference shows after a few steps.
        extra = {"diffusion_max_steps": 2, **kind.get("extra_args", {})}
        options = {**kind, "extra_args": extra}
        params.append(SamplingParams(max_tokens=C, seed=seed, ignore_eos=True, **options))
    prompts = [{"prompt_token_ids": random_ids(9 + i, V, i)} for i in range(len(KINDS))]
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], engine.canvases(outputs)


@pytest.fixture(scope="module")
def usual(checkpoint: Path, engine: Callable[..., Engine]) -> Any:
    return decode(engine(checkpoint, **OPTIONS))


def test_best_guesses_are_the_references(checkpoint: Path, engine: Callable[..., Engine]) -> None:
    served = engine(checkpoint, **OPTIONS)
    prompts = [random_ids(length, V, length) for length in (5, 40)]
    canvases = [random_ids(C, V, 100 + i) for i in range(2)]
    params = [
        SamplingParams(
            max_tokens=C,
            extra_args={"diffusion_seed_canvas": canvas, "diffusion_max_steps": 1},
            ignore_eos=True,
        )
        for canvas in canvases
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = served.llm.generate(inputs, params, use_tqdm=False)
    model = reference.load(checkpoint)
    for prompt, canvas, output in zip(prompts, canvases, outputs, strict=True):
        expected = reference.first_step_logprobs(model, prompt, canvas)
        assert list(output.outputs[0].token_ids) == expected.argmax(-1).tolist()
        (step,) = served.steps(output.request_id)
        # The last of one step is at t_min + (t_max - t_min) / 1, the schedule's start.
        entropy = torch.distributions.Categorical(logits=expected / 0.8).entropy().mean()
        assert step["entropy"] == pytest.approx(entropy.item(), abs=1e-3)


def test_small_tiles(checkpoint: Path, engine: Callable[..., Engine], usual: Any) -> None:
    """Nor on a tolerance that is next to nothing."""
    settings = {"sampling_memory_mib": 1, "self_conditioning_tolerance": 1e-7}
    small = engine(checkpoint, settings=settings, **OPTIONS)
    assert decode(small) == usual


def test_no_step_waits_for_the_device(checkpoint: Path, engine: Callable[..., Engine]) -> None:
    """Of one token budget less than a canvas for each: some are cut short and taken back."""
    served = engine(checkpoint, max_num_batched_tokens=100, **WATCHED, **OPTIONS)
    assert waits_during(served, lambda: decode(served)) == []


def test_two_processes_share_the_vocabulary(
    checkpoint: Path,
    engine: Callable[..., Engine],
    usual: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    tokens, _ = decode(engine(checkpoint, tensor_parallel_size=2, **OPTIONS))
    # Sums over processes round differently, which a noisy draw on the way may show.
    assert tokens == usual[0]
