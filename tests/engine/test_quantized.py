"""Quantised checkpoints are served as transformers computes them with the same roundings."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from vllm import SamplingParams

from checkpoints.recipes.images.seeing import save_seeing, start_seeing
from checkpoints.recipes.images.tasks import IMAGE_TASKS, generate_image
from checkpoints.recipes.tokenizer import IMAGE_ID, build_tokenizer
from tests import tolerances
from tests.engine import quantized, reference
from tests.engine.conftest import (
    CHECKPOINTS,
    HELD_OUT,
    TRAINED,
    Engine,
    GetEngine,
    GetTiny,
    chat_tokens,
    tokens_of,
)
from tests.engine.one_step import Prompt, random_ids, read_one_step
from tests.engine.rounding import assert_same, decided
from vllm_dllm.tools.quantize.quantize import quantize

pytestmark = pytest.mark.numerics

VOCAB = 512
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.3,
    "max_logprobs": VOCAB,
}
# Also left unquantised: of a layer of full attention, which has no v_proj, the attention; of
# another the experts, by patterns that name the checkpoint's modules, not vLLM's.
IGNORE = {
    "FP8_DYNAMIC": [r"re:model\.decoder\.layers\.1\.experts"],
    "NVFP4": [
        r"re:.*\.decoder\.layers\.1\.experts",
        *(f"model.decoder.layers.3.self_attn.{name}_proj" for name in "qko"),
    ],
    "W8A8": [r"re:model\.decoder\.layers\.1\.experts"],
    "W4A16": [r"re:model\.decoder\.layers\.1\.experts"],
}
# (prompt length, canvas width, how many): the longer, the more roundings.
CASES = [(1, 1, 6), (3, 2, 10), (3, 8, 6), (40, 32, 2), (150, 32, 1)]


@pytest.mark.parametrize("scheme", quantized.FORMATS)
def test_one_step(engine: GetEngine, tiny: GetTiny, tmp_path: Path, scheme: str) -> None:
    """Where every rounding is decided. A number halfway between two of e4m3's goes either way,
    with the last bit of a sum; random weights then amplify that to anything. Long canvases of FP8
    have such a number more often than not, so short ones are here too."""
    path = quantized.quantize(tiny(64), tmp_path / scheme, scheme, IGNORE[scheme])
    if scheme == "FP8_DYNAMIC":
        quantized.add_kv_cache_scales(path)  # must not matter: the cache is fp32
    if (served := quantized.started(engine, path, scheme, **OPTIONS)) is None:
        return
    model, plain = quantized.load(path, tiny(64)), reference.load(tiny(64))
    compared, shift = 0, []
    for prompt_length, width, count in CASES:
        for seed in range(count):
            prompt = random_ids(prompt_length, VOCAB, seed)
            canvas = random_ids(width, VOCAB, 1000 + seed)
            again = partial(reference.first_step_logprobs, model, prompt, canvas)
            if not quantized.is_decided(again, expected := again(), 3):
                continue
            options = {"diffusion_canvas_length": width}
            read = read_all(served, prompt, canvas, options)
            off = (read - expected).abs().max()
            assert off < tolerances.BETWEEN_TIES, f"{prompt_length=} {width=} {seed=}"
            compared += 1
            unquantised = reference.first_step_logprobs(plain, prompt, canvas)
            shift.append((expected - unquantised).abs().max().item())
    assert compared >= 12
    assert min(shift) > 0.1  # quantisation can be seen


def read_all(
    served: Engine, prompt: Prompt, canvas: list[int], xargs: dict[str, Any]
) -> torch.Tensor:
    """Log-probabilities of all tokens, [C, V]."""
    (positions,) = read_one_step(served, [prompt], [canvas], xargs=xargs, num_logprobs=VOCAB)
    return torch.tensor([[scores[token] for token in range(VOCAB)] for scores in positions])


SHIPPED = {
    "FP8_DYNAMIC": CHECKPOINTS / "diffusiongemma-tiny-FP8-dynamic",
    "NVFP4": CHECKPOINTS / "diffusiongemma-tiny-NVFP4",
}


@pytest.fixture(scope="module", params=SHIPPED)
def shipped(request: pytest.FixtureRequest) -> Path:
    return SHIPPED[request.param]


NUM_PROMPTS = 20
NEAR_BOUNDARY, NEAR_BOUNDARY_INT8 = 0.4, 0.75
"""Share of the answers, at most. e4m3 has a boundary in a 16th of a number, int8 in a 127th of the
row's largest, so numbers lie near one up to eight times as often."""


def assert_equal_near_boundaries(
    served: Engine,
    model: Any,  # what `served` should compute
    plain: Any,  # the same, not quantised
    pairs: list[tuple[Prompt, list[int]]],  # with the canvas of each prompt
    *,
    least_shift: float,  # that quantising makes, in nats
    most_near: float = NEAR_BOUNDARY,
) -> None:
    """One step. Where a number lies on the boundary between two of the format's, fp32's last bit
    decides: the reference itself then moves with inputs that are off by as much. Only such answers
    may differ, and few do."""
    near_boundary, shift = 0, []
    for number, (prompt, canvas) in enumerate(pairs):
        read = read_all(served, prompt, canvas, {"diffusion_canvas_length": 1})
        again = partial(reference.first_step_logprobs, model, prompt, canvas)
        expected = again()
        if (read - expected).abs().max() >= tolerances.BETWEEN_TIES:
            near_boundary += 1
            assert not quantized.is_decided(again, expected), f"{number=}"
        unquantised = reference.first_step_logprobs(plain, prompt, canvas)
        shift.append((expected - unquantised).abs().max().item())
    assert near_boundary <= most_near * len(pairs)
    assert min(shift) > least_shift


def test_one_step_of_the_shipped(engine: GetEngine, shipped: Path) -> None:
    """Held-out prompts, none left out."""
    served = engine(shipped, **OPTIONS)
    model, plain = quantized.load(shipped, TRAINED), reference.load(TRAINED)
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    pairs: list[tuple[Prompt, list[int]]] = []
    for seed, row in enumerate(HELD_OUT[:: len(HELD_OUT) // NUM_PROMPTS][:NUM_PROMPTS]):
        prompt = chat_tokens(tokenizer, row["messages"])
        canvas = random_ids(1, VOCAB, seed)
        pairs.append((prompt, canvas))
    assert_equal_near_boundaries(served, model, plain, pairs, least_shift=0.1)


NUM_PICTURES = 8


@pytest.mark.parametrize(
    "scheme",
    [
        "nvfp4",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("fp8-dynamic", "int8", "w4a16")
        ),
    ],
)
def test_images(engine: GetEngine, tmp_path: Path, scheme: str) -> None:
    """`vllm-dllm quantize` leaves tower and projection alone, and its copy sees as the reference
    does with them. Text is answered beside the pictures."""
    torch.manual_seed(0)
    original, path, tokenizer = tmp_path / "original", tmp_path / scheme, build_tokenizer()
    save_seeing(start_seeing(len(tokenizer), TRAINED), tokenizer, original)
    prompts = tmp_path / "prompts.jsonl"
    lines = (CHECKPOINTS / "calibration.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[:: len(lines) // 4]))
    quantize(original, scheme, path, prompts if scheme == "nvfp4" else None)
    before, after = (load_file(folder / "model.safetensors") for folder in (original, path))
    tower = [name for name in before if ".vision_tower." in name or ".embed_vision." in name]
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)

    if (served := quantized.started(engine, path, scheme, **OPTIONS)) is None:
        return
    model, plain = quantized.load(path, original), reference.load(original)
    rng, pairs = random.Random(0), list[tuple[Prompt, list[int]]]()
    for seed in range(NUM_PICTURES):
        example = generate_image(rng, list(IMAGE_TASKS)[seed % len(IMAGE_TASKS)], held_out=True)
        tokens = chat_tokens(tokenizer, example.template_messages())
        seen = reference.Seen.prepare(original, tokens, [example.picture.image])
        text = [token for token in tokens if token != IMAGE_ID]
        canvas = random_ids(1, VOCAB, seed)
        pairs += [(seen, canvas), (text, canvas)]
    most_near = NEAR_BOUNDARY_INT8 if scheme == "int8" else NEAR_BOUNDARY
    assert_equal_near_boundaries(served, model, plain, pairs, least_shift=0.01, most_near=most_near)


def answers(served: Engine) -> list[list[int]]:
    rows = HELD_OUT[::100]
    narrow = {"diffusion_canvas_length": 64}  # the answers are short, and emulation is slow
    params = [
        SamplingParams(max_tokens=64, seed=seed, extra_args=narrow) for seed in range(len(rows))
    ]
    chats = [row["messages"] for row in rows]
    return list(map(tokens_of, served.llm.chat(chats, params, use_tqdm=False)))


def test_two_processes_answer_as_one(
    engine: GetEngine, two_processes: dict[str, int], shipped: Path
) -> None:
    """They share the linears, with the scales of their rows or columns, and part the experts among
    them."""
    one = engine(shipped, **OPTIONS)
    alone = decided(one.llm, lambda: answers(one))
    two = engine(shipped, enable_expert_parallel=True, **OPTIONS, **two_processes)
    assert_same(answers(two), alone)


@pytest.mark.parametrize("described_in", ["config.json", "hf_quant_config.json"])
def test_modelopt_answers_as_compressed_tensors(
    engine: GetEngine, tmp_path: Path, described_in: str
) -> None:
    """To the bit: the shipped ones have the same numbers. In fp32, too, which vLLM's own method
    does not know."""
    path = tmp_path / "modelopt"
    shutil.copytree(CHECKPOINTS / "diffusiongemma-tiny-ModelOpt-NVFP4", path)
    if described_in == "config.json":
        (path / "hf_quant_config.json").unlink()
    else:
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]
        (path / "config.json").write_text(json.dumps(config))
    rows = HELD_OUT[:8]
    params = SamplingParams(max_tokens=64, logprobs=2, seed=1)

    def answers(checkpoint: Path) -> list[Any]:
        llm = engine(checkpoint, **OPTIONS).llm
        outputs = llm.chat([row["messages"] for row in rows], params, use_tqdm=False)
        return [(o.outputs[0].token_ids, repr(o.outputs[0].logprobs)) for o in outputs]

    assert answers(path) == answers(CHECKPOINTS / "diffusiongemma-tiny-NVFP4")
