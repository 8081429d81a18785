"""Translates the layers that a checkpoint's `quantization_config` names into vLLM's names.

vLLM renames layers that are written in full, but matches patterns (`re:...`) against its own names,
and it looks for the value projection that full-attention layers lack. So both are written in full
here.
"""

import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

IN_VLLM, IN_CHECKPOINT = "model.", "model.decoder."


def list_linears(text_config: PretrainedConfig) -> Iterator[str]:
    """Yields the names of the text model's linears that may be quantised, such as
    `layers.0.mlp.up_proj`. Each expert's linears are named. Full-attention layers have no
    `v_proj`."""
    for i, layer_type in enumerate(text_config.layer_types):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if name != "v_proj" or layer_type != "full_attention":
                yield f"layers.{i}.self_attn.{name}"
        for block in ("mlp", *(f"experts.{e}" for e in range(text_config.num_experts or 0))):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"layers.{i}.{block}.{name}"


def add_vllm_names(config: CompressedTensorsConfig, text_config: PretrainedConfig) -> None:
    """Adds vLLM's names of layers to `ignore` and the targets of `config`, in place, where they
    have the checkpoint's names or patterns."""
    names = list(list_linears(text_config))
    values = [
        f"layers.{i}.self_attn."
        for i, layer_type in enumerate(text_config.layer_types)
        if layer_type == "full_attention"
    ]
    config.ignore = [*config.ignore, *_unmatched_names(config.ignore, names, values)]
    schemes: dict[str, Any] = config.target_scheme_map
    for target in list(schemes):
        for name in _unmatched_names([target], names, values):
            schemes.setdefault(name, schemes[target])


def _unmatched_names(patterns: list[str], names: list[str], values: list[str]) -> Iterator[str]:
    """Yields vLLM's names of layers that `patterns` mean but do not match. `names`: linears as in
    `list_linears`. `values`: attention layers whose values are projected by `k_proj`, as
    prefixes."""
    compiled = [re.compile(p.removeprefix("re:")) for p in patterns if p.startswith("re:")]
    in_full = set(patterns)

    def matches(name: str) -> bool:
        return name in in_full or any(p.match(name) for p in compiled)

    for name in names:
        if not matches(IN_VLLM + name) and matches(IN_CHECKPOINT + name):
            yield IN_VLLM + name
    for layer in values:
        key, value = f"{layer}k_proj", f"{layer}v_proj"
        if not matches(IN_VLLM + value) and (
            matches(IN_VLLM + key) or matches(IN_CHECKPOINT + key)
        ):
            yield IN_VLLM + value
