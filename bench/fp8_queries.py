"""What fp8 queries would cost where the KV cache is fp8: errors by emulation, no GPU.

    python -m bench.fp8_queries

Tensor cores multiply numbers of one type. Our kernel makes bf16 of an fp8 cache's keys; the other
way is to make e4m3 of the queries, with a scale for each row. The products are emulated: rounded
numbers, multiplied and added in fp32. Errors are against numbers that nobody rounded.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from attention_kernels.testing import rms_ratio

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
KEYS, QUERIES = 1280, 256  # of a sliding layer: a canvas and its window


class Inputs(NamedTuple):
    query: torch.Tensor  # [T, D] fp32, scaled
    key: torch.Tensor  # [N, D] fp32
    value: torch.Tensor  # [N, D] fp32


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """As vLLM stores keys and values without calibrated scales: the scale is 1."""
    return x.clamp(-LARGEST, LARGEST).to(FP8).float()


def e4m3_rows(x: torch.Tensor) -> torch.Tensor:
    """With a scale for each row, the smallest that lets all of it be stored."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return e4m3(x / scale) * scale


# Name: what is made of queries, of keys and values, of weights.
Rounding = Callable[[torch.Tensor], torch.Tensor]
WAYS: dict[str, tuple[Rounding, Rounding, Rounding]] = {
    "bf16 cache": (bf16, bf16, bf16),
    "fp8 cache, bf16 queries (ours)": (bf16, e4m3, bf16),
    "fp8 cache, fp8 queries, a scale a row": (e4m3_rows, e4m3, bf16),
    "fp8 cache, fp8 queries and weights (stock)": (e4m3, e4m3, lambda x: e4m3(256 * x) / 256),
}


def attend(inputs: Inputs, way: str, scale: float) -> torch.Tensor:
    of_query, of_cache, of_weights = WAYS[way]
    query, key, value = bf16(inputs.query), of_cache(inputs.key), of_cache(inputs.value)
    scores = of_query(query) @ key.T * scale
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return of_weights(weights) @ value / weights.sum(-1, keepdim=True)


def error(inputs: Inputs, way: str, scale: float) -> torch.Tensor:
    """RMS ratio of each row."""
    query, key, value = (x.double() for x in inputs)
    right = torch.softmax(query @ key.T * scale, -1) @ value
    return rms_ratio(attend(inputs, way, scale), right)


def random_inputs() -> Iterator[tuple[str, Inputs, float]]:
    """Name, numbers, scale of the scores. Queries and keys are normed as Gemma's are."""
    for head_size in (256, 512):
        for spread in (1.0, 3.0):
            generator = torch.Generator().manual_seed(head_size)
            query, key, value = (
                torch.randn(rows, head_size, generator=generator) for rows in (QUERIES, KEYS, KEYS)
            )
            scale = spread / head_size**0.5
            name = f"head {head_size}, scores {spread:g} apart"
            yield name, Inputs(query, key, value), scale
            loud = torch.ones(head_size)
            loud[torch.randperm(head_size, generator=generator)[: head_size // 32]] = 8.0
            # The same spread of scores, most of it from few channels.
            yield (
                f"{name}, a channel in 32 eight times as large",
                Inputs(query * loud, key * loud, value),
                scale / (loud**4).mean().sqrt().item(),
            )


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    report: dict[str, list[float]] = {}
    for name, inputs, scale in random_inputs():
        print(f"\n{name}: RMS error of a row, median and 99th percentile")
        for way in WAYS:
            middle, worst = error(inputs, way, scale).quantile(
                torch.tensor([0.5, 0.99], dtype=torch.float64)
            )
            print(f"  {way:44} {middle:8.3%} {worst:8.3%}")
            report[f"{name}/{way}"] = [middle.item(), worst.item()]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
