"""Weights to reload, and how an engine of the tests is told to."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.engine.one_step import random_ids

# The longest takes several blocks of the prefix cache.
PROMPTS = [random_ids(length, 256, seed=length) for length in (3, 40, 300)]
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "block_size": 32}


def altered(checkpoint: Path, target: Path) -> Path:
    """A copy whose matrices are others, a little."""
    shutil.copytree(checkpoint, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.dim() == 2 and "embed" not in name:
            drawn = torch.randn(weight.shape, generator=generator)
            weights[name] = weight + 0.3 * weight.std() * drawn.to(weight.dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def incomplete(checkpoint: Path, target: Path, name: str) -> Path:
    """The weights of `checkpoint` without the tensor `name`."""
    weights = load_file(checkpoint / "model.safetensors")
    del weights[name]
    target.mkdir()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def reload(llm: LLM, checkpoint: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})


def sleep_and_wake(llm: LLM) -> None:
    llm.sleep(level=2)
    assert llm.llm_engine.is_sleeping()
    llm.wake_up()


def answers(llm: LLM, **extra_args: Any) -> list[list[int]]:
    """Of two blocks or more; the second one sees the first one's keys."""
    params = [
        SamplingParams(max_tokens=48, seed=i, ignore_eos=True, extra_args=extra_args)
        for i in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def require_second_weights(
    served: LLM, second: Path, of_second: list[list[int]], **extra_args: Any
) -> None:
    """`served`, started with other weights, answers as an engine of the checkpoint `second` does
    once it has loaded that, and after it has slept."""
    of_first = answers(served, **extra_args)
    assert all(a != b for a, b in zip(of_first, of_second, strict=True))
    reload(served, second)
    assert answers(served, **extra_args) == of_second
    sleep_and_wake(served)
    assert answers(served, **extra_args) == of_second
