"""Excludes the tokens that a grammar does not allow from a canvas' logits."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise.impossible import ILLEGAL_LOGIT


class RowMasks(NamedTuple):
    """The legal tokens of some rows of a canvas, see `vllm_dllm.grammar`. They stay on the host,
    because with a large vocabulary they take megabytes, and only some rows are needed at a time."""

    rows: np.ndarray  # [m] int64, rising, rows of the canvas
    words: np.ndarray  # [m, W] uint32, a bit for each token

    def exclude_(
        self,
        logits: torch.Tensor,  # [l, V] fp32, changed in place
        first: int,  # row of the canvas
    ) -> None:
        """Excludes the tokens that are not legal from rows `first` to `first + l` of the canvas.
        Rows without an entry stay."""
        begin, end = np.searchsorted(self.rows, (first, first + len(logits)))
        if begin == end:
            return
        rows = async_tensor_h2d(self.rows[begin:end] - first, device=logits.device)
        words = async_tensor_h2d(self.words[begin:end].view(np.int32), device=logits.device)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_legal = (words[:, :, None] >> bits) & 1
        is_legal = is_legal.flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill_(~is_legal, ILLEGAL_LOGIT)
