"""Masked models' checkpoints: no tensor may be missing."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.engine.masked import CONFIGS, build, published_weights
from tests.unit.models.building import build_any
from vllm_dllm import plugin
from vllm_dllm.config.architectures import FAMILIES

ARCHITECTURES = sorted(FAMILIES)
_IS_TRIED = re.compile(r"(?!.*layers\.2|.*experts\.(?!5\.))").match
"""Of like tensors a few."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_tensor_is_named(tmp_path: Path, architecture: str) -> None:
    plugin.register()
    config = CONFIGS[architecture] | {
        "architectures": [architecture],
        "vocab_size": 512,
        "mask_token_id": 500,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    served, _ = build_any(tmp_path, "meta", "float32")
    with torch.device("meta"):
        weights = published_weights(build(architecture, config), architecture)
    served.load_weights(iter(weights.items()))
    for name in filter(_IS_TRIED, weights):
        left = {key: weight for key, weight in weights.items() if key != name}
        assert len(left) == len(weights) - 1
        with pytest.raises(
            ValueError, match=re.escape(f"no weights for {name}. Check that its files")
        ):
            served.load_weights(iter(left.items()))
