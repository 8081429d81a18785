"""Quantised masked models are served as their references compute them with the same roundings."""

import copy
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import RequestOutput

from tests import tolerances
from tests.engine import quantized
from tests.engine.conftest import GetEngine
from tests.engine.fast_dllm import ShiftedReference
from tests.engine.masked import Reference, Rule, make_checkpoint
from tests.engine.masked_requests import FAMILIES, VOCABULARY, params_of
from tests.engine.nemotron import FirstTokenReference
from tests.engine.one_step import random_ids
from vllm_dllm.tools.quantize.quantize import quantize

pytestmark = pytest.mark.numerics

BLOCK = 4
QUANTIZED = ("SDAR", "MoE", "LLaDA2", "Nemotron", "Fast-dLLM")
FORMATS = {"fp8-dynamic": "FP8_DYNAMIC", "int8": "W8A8", "w4a16": "W4A16"}
ONCE = {("SDAR", scheme) for scheme in FORMATS} | {("LLaDA2", "fp8-dynamic"), ("MoE", "int8")}
PROMPTS = [random_ids((1, 2, 3, 5, 6)[seed % 5], VOCABULARY, seed) for seed in range(25)]


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param(family, scheme, marks=() if (family, scheme) in ONCE else pytest.mark.thorough)
        for family in QUANTIZED
        for scheme in FORMATS
    ],
)
def test_one_step(engine: GetEngine, tmp_path: Path, family: str, scheme: str) -> None:
    """A number halfway between two of the format's goes either way, with the last bit of a sum. The
    reference then moves with inputs that are off by as much, too; only such answers may differ."""
    architecture, kind, *_ = FAMILIES[family]
    source, made = make_checkpoint(tmp_path / "plain", BLOCK, architecture)
    quantize(source, scheme, target := tmp_path / scheme)
    if (served := quantized.started(engine, target, scheme, block_size=32)) is None:
        return
    plain = kind(made.model, BLOCK, made.mask_id)
    rounded = kind(copy.deepcopy(made.model), BLOCK, made.mask_id)
    prefix = "encoder." if family == "Nemotron" else ""
    stack = rounded.model.model if prefix else rounded.model
    stored = load_file(target / "model.safetensors")
    quantized.compute_quantized(stack, stored, FORMATS[scheme], prefix)
    params = [params_of(Rule("static", num_steps=1), BLOCK, 0, logprobs=20)] * len(PROMPTS)
    outputs = served.ask(PROMPTS, params)
    equal, shift = 0, []
    for seed, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        again = partial(first_block, rounded, prompt)
        expected = again()
        if largest_difference(expected, output) >= tolerances.BETWEEN_TIES:
            assert not quantized.is_decided(again, expected), f"{seed=}"
            continue
        equal += 1
        shift.append((expected - first_block(plain, prompt)).abs().max().item())
    assert equal >= 10
    assert min(shift) > 5 * tolerances.BETWEEN_TIES  # quantisation can be seen


def test_gptq_answers_as_w4a16(engine: GetEngine, tmp_path: Path) -> None:
    """To the bit: the same numbers, packed along the other axis."""
    source, _ = make_checkpoint(tmp_path / "plain", BLOCK, FAMILIES["SDAR"][0])
    quantize(source, "w4a16", packed := tmp_path / "w4a16")
    transposed = write_as_gptq(packed, tmp_path / "gptq")
    params = [params_of(Rule("static", num_steps=1), BLOCK, 0, logprobs=20)] * len(PROMPTS)

    def answers(path: Path) -> list[tuple[Sequence[int], str]]:
        served = engine(path, block_size=32, dtype="bfloat16")
        outputs = served.ask(PROMPTS, params)
        return [(o.outputs[0].token_ids, repr(o.outputs[0].logprobs)) for o in outputs]

    expected = answers(packed)
    assert answers(transposed) == expected


def test_a_packed_lm_head(engine: GetEngine, tmp_path: Path) -> None:
    """It has no `weight`. As in a server, somebody counts."""
    path, _ = make_checkpoint(tmp_path, BLOCK, FAMILIES["SDAR"][0])
    config = json.loads((path / "config.json").read_text())
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["re:.*lm_head"], "weights": scheme}},
    }
    (path / "config.json").write_text(json.dumps(config))
    served = engine(path, block_size=32, load_format="dummy", disable_log_stats=False)
    params = params_of(Rule("static", num_steps=1), BLOCK, 0)
    (output,) = served.ask([PROMPTS[0]], params)
    assert output.outputs[0].token_ids


def write_as_gptq(source: Path, target: Path) -> Path:
    """Writes the W4A16 checkpoint `source` to `target` in GPTQ's layout."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    for module in [n.removesuffix("_packed") for n in weights if n.endswith(".weight_packed")]:
        scale = weights.pop(f"{module}_scale").t().contiguous()  # [K / group, N]
        num_groups, rows = scale.shape
        layer = module.removesuffix(".weight")
        weights[f"{layer}.qweight"] = weights.pop(f"{module}_packed").t().contiguous()
        weights[f"{layer}.scales"] = scale
        weights[f"{layer}.qzeros"] = torch.full((num_groups, rows // 8), 0x77777777).int()
        columns = torch.arange(int(weights.pop(f"{module}_shape")[1]), dtype=torch.int32)
        weights[f"{layer}.g_idx"] = columns // quantized.INT4_GROUP
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": quantized.INT4_GROUP,
        "desc_act": False,
        "sym": True,
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def largest_difference(
    expected: torch.Tensor,  # [at most the answer's tokens, V]
    output: RequestOutput,
) -> float:
    return max(
        abs(float(row[token]) - entry.logprob)
        for row, scores in zip(expected, output.outputs[0].logprobs, strict=False)
        for token, entry in scores.items()
    )


@torch.inference_mode()
def first_block(decode: Reference, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens of the answer, V] of the first block, in one step."""
    if type(decode) is FirstTokenReference:
        seed = int(decode.seeded_logits(prompt, [])[-1].argmax())
        masks = [decode.mask_id] * (BLOCK - 1)
        return decode.seeded_logits(prompt, [seed, *masks])[-BLOCK:].log_softmax(-1)
    start = len(prompt) // BLOCK * BLOCK
    known, block = prompt[:start], prompt[start:]
    block = block + [decode.mask_id] * (BLOCK - len(block))
    if isinstance(decode, ShiftedReference):
        logits = decode.block_logits(known, block)
    else:
        logits = decode.logits(known + block)[start:]
    return logits[len(prompt) - start :].log_softmax(-1)
