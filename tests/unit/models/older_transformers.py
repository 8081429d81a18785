"""What published modelling files import, and transformers 5 or this machine does not have.

They were written for transformers 4.5x, and SDAR's for GPUs. Nothing here computes anything of a
model but RMS norms and the frequencies of rotations, as those packages do.
"""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.cache_utils
import transformers.utils
import transformers.utils.import_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def install(monkeypatch: pytest.MonkeyPatch) -> None:
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
