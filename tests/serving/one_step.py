"""Reads a single denoising step out of an engine, and compares it with transformers."""

import torch
from vllm import SamplingParams

from tests.serving import reference
from tests.serving.conftest import Engine

FEW_STEPS = {"diffusion_max_steps": 3}


def read_one_step(
    engine: Engine,
    prompts: list[list[int]],
    canvases: list[list[int]],
    neighbours: list[list[int]] | None = None,
) -> list[list[dict[int, float]]]:
    """{token: logprob} at temperature 1 of each canvas position after one denoising step.

    `neighbours` are prompts that generate two blocks in the same batch.
    """
    neighbours = neighbours or []
    generate = SamplingParams(max_tokens=64, ignore_eos=True, extra_args=FEW_STEPS)
    params = [
        SamplingParams(
            logprobs=20,
            max_tokens=len(canvas),
            extra_args={
                "diffusion_seed_canvas": canvas,
                "diffusion_max_steps": 1,
                "diffusion_read_only": True,
            },
        )
        for canvas in canvases
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in neighbours + prompts]
    params = [generate] * len(neighbours) + params
    outputs = engine.llm.generate(inputs, params, use_tqdm=False)[len(neighbours) :]
    return [
        [{t: entry.logprob for t, entry in at.items()} for at in output.outputs[0].logprobs]
        for output in outputs
    ]


def assert_equal_to_reference(
    model, prompts: list[list[int]], canvases: list[list[int]], read: list[list[dict[int, float]]]
) -> None:
    for prompt, canvas, positions in zip(prompts, canvases, read, strict=True):
        expected = reference.first_step_logprobs(model, prompt, canvas)
        assert len(positions) == len(canvas)
        for row, scores in zip(expected, positions, strict=True):
            assert max(scores, key=scores.__getitem__) == row.argmax(), f"prompt of {len(prompt)}"
            for token, logprob in scores.items():
                assert abs(row[token] - logprob) < 1e-3, f"prompt of {len(prompt)}"


def random_ids(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
