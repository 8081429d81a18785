"""Reads a single denoising step out of an engine, and compares it with transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm import SamplingParams

from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import Engine

Prompt = list[int] | reference.Seen

FEW_STEPS = {"diffusion_max_steps": 3}
CHUNK = 96  # tokens of a step
CACHED = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None, "block_size": 32}
PREFILLS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    "prefix-caching": CACHED | {"enable_chunked_prefill": False},
    "chunked-prefill": {"enable_prefix_caching": False, "max_num_batched_tokens": CHUNK},
    "both": CACHED | {"max_num_batched_tokens": CHUNK},
}
"""How prompts get into the cache, as options of an engine."""


def read_one_step(
    engine: Engine,
    prompts: Sequence[Prompt],
    canvases: list[list[int]],
    neighbours: Sequence[Prompt] = (),
    *,
    xargs: Mapping[str, Any] | None = None,
    from_cache: bool = False,
    num_logprobs: int = 20,
) -> list[list[dict[int, float]]]:
    """{token: logprob} at temperature 1 of each canvas position after one denoising step.

    `neighbours` are prompts that generate four blocks in the same batch, of one and two steps in
    turn, so that some commit while others denoise. `from_cache`: the prompts must be found in the
    prefix cache, in part.
    """
    generate = [
        SamplingParams(
            max_tokens=128, ignore_eos=True, extra_args={"diffusion_max_steps": 1 + i % 2}
        )
        for i in range(len(neighbours))
    ]
    params = [
        SamplingParams(
            logprobs=num_logprobs,
            max_tokens=len(canvas),
            extra_args={
                "diffusion_seed_canvas": canvas,
                "diffusion_max_steps": 1,
                "diffusion_read_only": True,
                **(xargs or {}),
            },
        )
        for canvas in canvases
    ]
    inputs = [getattr(prompt, "engine_input", prompt) for prompt in (*neighbours, *prompts)]
    outputs = engine.llm.generate(inputs, generate + params, use_tqdm=False)[len(neighbours) :]
    assert not from_cache or any(output.num_cached_tokens for output in outputs)
    return [
        [{t: entry.logprob for t, entry in at.items()} for at in output.outputs[0].logprobs]
        for output in outputs
    ]


def assert_equal_to_reference(
    model, prompts: Sequence[Prompt], canvases: list[list[int]], read: list[list[dict[int, float]]]
) -> None:
    assert_equal(first_steps(model, prompts, canvases), read)


def first_steps(
    model, prompts: Sequence[Prompt], canvases: list[list[int]]
) -> list[torch.Tensor]:  # [C, V] each
    """What transformers computes."""
    pairs = zip(prompts, canvases, strict=True)
    return [reference.first_step_logprobs(model, prompt, canvas) for prompt, canvas in pairs]


def assert_equal(expected: Sequence[torch.Tensor], read: list[list[dict[int, float]]]) -> None:
    for number, (rows, positions) in enumerate(zip(expected, read, strict=True)):
        for row, scores in zip(rows, positions, strict=True):
            best = max(scores, key=scores.__getitem__)
            assert is_best_guess(best, row), f"prompt {number}"
            for token, logprob in scores.items():
                off = abs(row[token] - logprob)
                assert off <= tolerances.LOGPROB, f"prompt {number}: {off:.1e} off"


def is_best_guess(token: int, log_probs: torch.Tensor) -> bool:
    """Of log-probabilities [V] that may be off by rounding, like those the token was chosen by."""
    return bool(log_probs[token] >= log_probs.max() - 2 * tolerances.LOGPROB)


def random_ids(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
