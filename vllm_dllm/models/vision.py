"""Runs images through a checkpoint's vision tower, to rows as wide as token embeddings.

Tower and projection are transformers' own modules: they are small beside the text layers, run once
per image, and so compute what the reference computes. Only the tower's MLPs are run by ours, to the
same bits.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModel, DiffusionGemmaConfig
from transformers.initialization import no_init_weights
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaMultimodalEmbedder,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionMLP


class InPlaceMLP(Gemma4VisionMLP):
    """transformers' MLP, which writes its widest product over the first factor.

    On CPUs a new tensor of that size comes from the kernel, page by page, which takes 5% of the
    tower's time.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).mul_(self.up_proj(x)))


def build_tower(config: DiffusionGemmaConfig, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Returns the vision tower and the projection behind it, without their weights."""
    with no_init_weights():
        tower = AutoModel.from_config(config.vision_config, dtype=dtype)
        projection = DiffusionGemmaMultimodalEmbedder(config.vision_config, config.text_config)
    for module in tower.modules():
        if isinstance(module, Gemma4VisionMLP):
            module.__class__ = InPlaceMLP
    return tower.eval(), projection.to(dtype).eval()


def encode_images(
    tower: nn.Module,
    projection: nn.Module,
    patches: torch.Tensor,  # [n, P, 3 * patch_size ** 2], zeros behind an image's last patch
    positions: torch.Tensor,  # [n, P, 2] int64, x and y of each patch; -1 behind the last
    num_tokens: Sequence[int],  # [n] soft tokens of each image
) -> list[torch.Tensor]:
    """Returns the embeddings of each image, [num_tokens[i], H]. The tower drops the padding and
    returns the tokens of all images in one tensor, so `num_tokens` must be those of the patches."""
    states = tower(pixel_values=patches, pixel_position_ids=positions).last_hidden_state
    return list(projection(states).split(list(num_tokens)))
