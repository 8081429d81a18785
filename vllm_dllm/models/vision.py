"""Images through a checkpoint's vision tower, as rows of the width of token embeddings.

Tower and projection are transformers' own modules: they are small beside the text layers, run once
per image, and so compute what the reference computes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, DiffusionGemmaConfig
from transformers.initialization import no_init_weights
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaMultimodalEmbedder,
)
from vllm.utils.torch_utils import async_tensor_h2d


def build(config: DiffusionGemmaConfig, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The vision tower and the projection behind it. Their weights are yet to be loaded."""
    with no_init_weights():
        tower = AutoModel.from_config(config.vision_config, dtype=dtype)
        projection = DiffusionGemmaMultimodalEmbedder(config.vision_config, config.text_config)
    return tower.eval(), projection.to(dtype).eval()


def encode(
    tower: nn.Module,
    projection: nn.Module,
    patches: torch.Tensor,  # [n, P, 3 * patch_size ** 2], zeros behind an image's last patch
    positions: torch.Tensor,  # [n, P, 2] int64, x and y of each patch; -1 behind the last
    num_tokens: Sequence[int],  # [n] soft tokens of each image
) -> list[torch.Tensor]:
    """[num_tokens[i], H] of each image."""

    def keep_tokens(
        pooler: nn.Module, given: Any, pooled: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, slice]:
        """An image's tokens are its first rows. The tower would find them by a mask of the device,
        for which the host waits."""
        states, _ = pooled  # [n, L, D]
        length = states.shape[1]
        rows = [i * length + row for i, count in enumerate(num_tokens) for row in range(count)]
        kept = async_tensor_h2d(rows, dtype=torch.int64, device=states.device)
        return states.flatten(0, 1)[kept], slice(None)

    with tower.pooler.register_forward_hook(keep_tokens):
        states = tower(pixel_values=patches, pixel_position_ids=positions).last_hidden_state
    return list(projection(states).split(list(num_tokens)))
