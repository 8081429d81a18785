"""A context that nobody computes: its keys and values are drawn, for an engine and for transformers
alike, so that a canvas can be compared behind more tokens than a CPU prefills in minutes.

The engine takes them from a KV connector of vLLM's.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import DiffusionGemmaTextConfig, DynamicCache
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

OPTIONS = {"kv_connector": "KnownContext", "kv_role": "kv_consumer"} | {
    "kv_connector_module_path": __name__
}


@cache
def draw(
    layer: int, length: int, heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:  # [length, heads, head_dim] bf16 each
    """Keys and values of a layer, of unit size, as its norms leave them."""
    generator = torch.Generator().manual_seed(layer)
    shape = (length, heads, head_dim)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    return keys, values


def num_known(prompt_len: int, block_size: int) -> int:
    """Whole blocks of a prompt, which keeps a token to compute."""
    return (prompt_len - 1) // block_size * block_size


def reference_cache(
    config: DiffusionGemmaTextConfig, length: int, dtype: torch.dtype, device: torch.device
) -> DynamicCache:
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = config.per_layer_config[layer]
        drawn = draw(layer, length, shape.num_key_value_heads, shape.head_dim)
        cache.update(*(each.to(device, dtype).transpose(0, 1)[None] for each in drawn), layer)
    return cache


@dataclass
class Known(KVConnectorMetadata):
    """Per request that is there for the first time: its length and its blocks."""

    requests: list[tuple[int, list[int]]] = field(default_factory=list)


class KnownContext(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return num_known(request.num_prompt_tokens, self._block_size) - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Known:
        return Known(
            [
                (num_known(len(new.prompt_token_ids), self._block_size), new.block_ids[0])
                for new in scheduler_output.scheduled_new_reqs
            ]
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        known = self._get_connector_metadata()
        assert isinstance(known, Known)
        attention = {
            name: layer
            for name, layer in forward_context.no_compile_layers.items()
            if hasattr(layer, "kv_cache")
        }
        for length, blocks in known.requests:
            slots = torch.tensor(blocks)[:, None] * self._block_size + torch.arange(
                self._block_size
            )
            for name, layer in attention.items():
                number = int(name.partition(".layers.")[2].partition(".")[0])
                device = layer.kv_cache.device
                drawn = draw(number, length, layer.num_kv_heads, layer.head_size)
                layer.impl.do_kv_cache_update(
                    layer,
                    *(each.to(device) for each in drawn),
                    layer.kv_cache,
                    slots.flatten()[:length].to(device),
                )

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
