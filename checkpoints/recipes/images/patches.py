"""Pictures as the vision tower takes them."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from checkpoints.recipes.images.drawing import PATCH, POOLING

PatchRows = tuple[Tensor, Tensor]


def to_patches(images: Sequence[Image.Image]) -> PatchRows:
    """Values [n, P, 48] from 0 to 1, and the place [n, P, 2] (x, y) of each patch; zeros and -1
    behind the last patch of an image that has fewer than P.

    What Gemma 4's image processor makes of them, but for P: that is always the same there.
    """
    values, places = [], []
    for image in images:
        width, height = image.width // PATCH, image.height // PATCH
        pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
        pixels = pixels.view(height, PATCH, width, PATCH, 3).transpose(1, 2)
        values.append(pixels.reshape(height * width, -1))
        index = torch.arange(height * width)
        places.append(torch.stack((index % width, index // width), dim=-1))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(values, batch_first=True), pad(places, batch_first=True, padding_value=-1)


def num_tokens(image: Image.Image) -> int:
    """How many image tokens an image becomes."""
    return image.width * image.height // (PATCH * POOLING) ** 2
