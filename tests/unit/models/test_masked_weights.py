"""Masked models' checkpoints: no tensor may be missing, and a wrong one is named."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.masked import CONFIGS, build, published_weights
from tests.unit.models.building import build_any
from vllm_dllm import plugin
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.quantization.complete_weights import weights_in_parts

ARCHITECTURES = sorted(FAMILIES)
_IS_TRIED = re.compile(r"(?!.*layers\.2|.*experts\.(?!5\.))").match
"""Of like tensors a few."""


def make(folder: Path, architecture: str, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model as it is served, without weights, and weights on `device` by their published
    names."""
    plugin.register()
    config = CONFIGS[architecture] | {
        "architectures": [architecture],
        "vocab_size": 512,
        "mask_token_id": 500,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    served, _ = build_any(folder, "meta", "float32")
    with torch.device(device):
        return served, published_weights(build(architecture, config), architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_tensor_is_named(tmp_path: Path, architecture: str) -> None:
    served, weights = make(tmp_path, architecture, "meta")
    served.load_weights(iter(weights.items()))
    for name in filter(_IS_TRIED, weights):
        left = {key: weight for key, weight in weights.items() if key != name}
        assert len(left) == len(weights) - 1
        with pytest.raises(
            ValueError, match=re.escape(f"no weights for {name}. Check that its files")
        ):
            served.load_weights(iter(left.items()))
    with weights_in_parts():
        for part in weights.items():
            served.load_weights(iter([part]))


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nan": (lambda w: torch.full_like(w, math.nan), "its numbers must be finite, got "),
    "shape": (lambda w: w[:-1], "its shape does not fit config.json"),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_tensor_is_named(tmp_path: Path, architecture: str, kind: str) -> None:
    """vLLM loads any numbers, and says nothing of which tensor does not fit."""
    change, complaint = WRONG[kind]
    served, weights = make(tmp_path, architecture, "cpu")
    name = next(n for n in weights if n.endswith(("o_proj.weight", "attention.dense.weight")))
    wrong = weights | {name: change(weights[name])}
    shape = list(wrong[name].shape)
    with pytest.raises(ValueError, match=re.escape(f"at {name} of shape {shape}: {complaint}")):
        served.load_weights(iter(wrong.items()))


def test_a_wrong_scale_is_named(tmp_path: Path) -> None:
    served, weights = make(tmp_path, "SDARForCausalLM", "cpu")
    scale = {"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(96, 1)}
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale .* only hold positive finite"):
        served.load_weights(iter((scale | weights).items()))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ImportError])
def test_an_error_that_is_not_the_checkpoints_stays_as_it_is(
    tmp_path: Path, error: type[Exception]
) -> None:
    served, weights = make(tmp_path, "SDARForCausalLM", "cpu")

    def fail_at_the_second() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(weights.items()))
        raise error("no")

    with pytest.raises(error, match=r"^no$"):
        served.load_weights(fail_at_the_second())
