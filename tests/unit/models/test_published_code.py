"""The reference that masked models are compared with, against a published modelling file: of SDAR,
TraDo or LLaDA2, which take a mask of who sees whom.

    VLLM_DLLM_PUBLISHED=FOLDER .venv/bin/pytest tests/unit/models/test_published_code.py

FOLDER holds a checkpoint's config.json and *.py, which may be all of it; they run. Their random
weights of few layers are made here. Without a folder, a stand-in shows that the test sees a fault.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tests import tolerances
from tests.engine.masked import Reference, make_checkpoint
from tests.engine.one_step import random_ids

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

FOLDER = os.environ.get("VLLM_DLLM_PUBLISHED")
BLOCK = 4
STAND_IN = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class StandInConfig(Qwen3Config):
    model_type = "sdar"

class StandIn(Qwen3ForCausalLM):
    config_class = StandInConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * SCALE
        return out
"""


def difference(published: Path, path: Path) -> float:
    """Of the published code's log-probabilities and the reference's, at most."""
    own = json.loads((published / "config.json").read_text())
    checkpoint, reference = make_checkpoint(path, BLOCK, own["architectures"][0])
    for file in published.glob("*.py"):
        shutil.copy(file, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = own["auto_map"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    # Not by transformers' Auto classes, which prefer a class of ours for this type of model, once
    # another test has registered it.
    config_cls, model_cls = (
        get_class_from_dynamic_module(own["auto_map"][name], str(checkpoint))
        for name in ("AutoConfig", "AutoModelForCausalLM")
    )
    model = model_cls.from_pretrained(
        checkpoint,
        config=config_cls.from_pretrained(checkpoint),
        attn_implementation="eager",
        dtype=torch.float32,
    ).eval()
    tokens = [*random_ids(13, 500, 0), *[reference.mask_id] * 3]
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([tokens]), attention_mask=seen(len(tokens))).logits[0]
    expected = Reference.logits(reference, tokens)
    return float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max())


def seen(length: int) -> torch.Tensor:
    """[1, 1, length, length] fp32, added to scores."""
    block = torch.arange(length) // BLOCK
    return torch.where(block[:, None] >= block, 0.0, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.published
def test_published_code(tmp_path: Path) -> None:
    assert FOLDER is not None
    assert difference(Path(FOLDER), tmp_path / "made") <= min(tolerances.LOGPROB, 1e-3)


@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (1.01, False)])
def test_a_fault_is_seen(tmp_path: Path, scale: float, is_right: bool) -> None:
    published = tmp_path / "published"
    published.mkdir()
    (published / "modeling_stand_in.py").write_text(STAND_IN.replace("SCALE", str(scale)))
    auto_map = {
        "AutoConfig": "modeling_stand_in.StandInConfig",
        "AutoModelForCausalLM": "modeling_stand_in.StandIn",
    }
    config = {"architectures": ["SDARForCausalLM"], "auto_map": auto_map}
    (published / "config.json").write_text(json.dumps(config))
    found = difference(published, tmp_path / "made")
    assert (found <= min(tolerances.LOGPROB, 1e-3)) == is_right
