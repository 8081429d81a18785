"""FP8 and NVFP4 checkpoints are served as transformers computes them with the same roundings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving import quantized, reference
from tests.serving.conftest import Engine
from tests.serving.one_step import random_ids, read_one_step

VOCAB = 512
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.3}
# Also left unquantised: of a layer of full attention, which has no v_proj, the attention; of
# another the experts, by patterns that name the checkpoint's modules, not vLLM's.
IGNORE = {
    "FP8_DYNAMIC": [r"re:model\.decoder\.layers\.1\.experts"],
    "NVFP4": [
        r"re:.*\.decoder\.layers\.1\.experts",
        *(f"model.decoder.layers.3.self_attn.{name}_proj" for name in "qko"),
    ],
}
# (prompt length, canvas width, how many): the longer, the more roundings.
CASES = [(1, 1, 6), (3, 2, 10), (3, 8, 6), (40, 32, 2), (150, 32, 1)]


@pytest.mark.parametrize("scheme", quantized.FORMATS)
def test_one_step(
    engine: Callable[..., Engine], tiny: Callable[[int], Path], tmp_path: Path, scheme: str
) -> None:
    """Where every rounding is decided. A number halfway between two of e4m3's goes either way,
    with the last bit of a sum; random weights then amplify that to anything. Long canvases of FP8
    have such a number more often than not, so short ones are here too."""
    path = quantized.quantize(tiny(64), tmp_path / scheme, scheme, IGNORE[scheme])
    if scheme == "FP8_DYNAMIC":
        quantized.add_kv_cache_scales(path)  # must not matter: the cache is fp32
    served = engine(path, **OPTIONS)
    model, plain = quantized.load(path, tiny(64)), reference.load(tiny(64))
    compared, shift = 0, []
    for prompt_length, width, count in CASES:
        for seed in range(count):
            prompt = random_ids(prompt_length, VOCAB, seed)
            canvas = random_ids(width, VOCAB, 1000 + seed)
            expected = reference.first_step_logprobs(model, prompt, canvas)
            if not is_decided(model, prompt, canvas, expected):
                continue
            options = {"diffusion_canvas_length": width}
            (positions,) = read_one_step(served, [prompt], [canvas], xargs=options)
            for row, scores in zip(expected, positions, strict=True):
                for token, logprob in scores.items():
                    assert abs(row[token] - logprob) < 1e-2, f"{prompt_length=} {width=} {seed=}"
            compared += 1
            unquantised = reference.first_step_logprobs(plain, prompt, canvas)
            shift.append((expected - unquantised).abs().max().item())
    assert compared >= 12
    assert min(shift) > 0.1  # quantisation can be seen


def is_decided(model: Any, prompt: list[int], canvas: list[int], expected: torch.Tensor) -> bool:
    """Whether noise of the size of fp32's errors leaves the answer alone."""
    for seed in range(3):
        torch.manual_seed(seed)
        with quantized.noisy_inputs(3e-7):
            noisy = reference.first_step_logprobs(model, prompt, canvas)
        if (noisy - expected).abs().max() > 1e-3:
            return False
    return True
