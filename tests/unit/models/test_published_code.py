"""The reference that masked models are compared with, against a published modelling file: of SDAR,
TraDo, LLaDA2 or Fast-dLLM v2.

    VLLM_DLLM_PUBLISHED=FOLDER .venv/bin/pytest tests/unit/models/test_published_code.py

FOLDER holds a checkpoint's config.json and *.py, which may be all of it; they run. Their random
weights of few layers are made here, and so is what they import of packages that transformers 5 or
this machine does not have: they were written for transformers 4.5x, and SDAR's for GPUs. Nothing of
that computes anything of a model but RMS norms and the frequencies of rotations. Without a folder,
a stand-in shows that the test sees a fault.
"""

import importlib.machinery
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.cache_utils
import transformers.utils
import transformers.utils.import_utils
from safetensors.torch import load_file
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
    config = own | json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = own["auto_map"]
    config.pop("layer_types", None)  # of the published number of layers
    (checkpoint / "config.json").write_text(json.dumps(config))
    # Not by transformers' Auto classes, which prefer a class of ours for this type of model, once
    # another test has registered it.
    config_cls, model_cls = (
        get_class_from_dynamic_module(own["auto_map"][name], str(checkpoint))
        for name in ("AutoConfig", "AutoModelForCausalLM")
    )
    model_cls._tied_weights_keys = {}  # a list in older files; nothing is tied here
    # Not `from_pretrained`, which leaves buffers that no checkpoint holds, rotations, undefined.
    model = model_cls._from_config(
        config_cls.from_pretrained(checkpoint), attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    tokens = [*random_ids(13, 500, 0), *[reference.mask_id] * 3]
    visible = who_sees_whom(own["architectures"][0], len(tokens))
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([tokens]), **visible).logits[0]
    expected = Reference.logits(reference, tokens)
    return float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max())


def who_sees_whom(architecture: str, length: int) -> dict[str, Any]:
    """As the published loops say it."""
    if architecture == "Fast_dLLM_QwenForCausalLM":
        return {"block_size": BLOCK}
    block = torch.arange(length) // BLOCK
    seen = (block[:, None] >= block)[None, None]
    # LLaDA2's is added to scores.
    return {"attention_mask": seen.float().log() if architecture == "LLaDA2MoeModelLM" else seen}


@pytest.mark.published
def test_published_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FOLDER is not None
    install_older_packages(monkeypatch)
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


def install_older_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as `monkeypatch` lasts."""
    for module, name, stand_in in (
        (transformers.utils, "LossKwargs", transformers.utils.TransformersKwargs),
        (transformers.cache_utils, "SlidingWindowCache", transformers.cache_utils.StaticCache),
        (transformers.utils.import_utils, "is_torch_fx_available", lambda: False),
    ):
        monkeypatch.setattr(module, name, stand_in, raising=False)
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", plain_rotations)
    for name, contents in {
        "flash_attn": {"flash_attn_func": None, "flash_attn_varlen_func": None},
        "flash_attn.bert_padding": dict.fromkeys(("index_first_axis", "pad_input", "unpad_input")),
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.layer_norm": {"rms_norm_fn": rms_norm},
    }.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def plain_rotations(
    config: Any, device: torch.device | None = None, **_: Any
) -> tuple[torch.Tensor, float]:
    """Frequencies [rotated / 2] fp32, and what cosines and sines are multiplied by."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * getattr(config, "partial_rotary_factor", 1.0))
    places = torch.arange(0, rotated, 2, dtype=torch.float32, device=device)
    theta = config.rope_parameters["rope_theta"]
    return theta ** -(places / rotated), 1.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, bias: None, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
