"""Masks of grammars take from a canvas' logits what they say, in tiles or at once."""

import numpy as np
import pytest
import torch

from vllm_dllm.denoise.impossible import ILLEGAL_LOGIT, MASKED_LOGIT
from vllm_dllm.step.logits.canvas_logits import RowMasks

L, V = 7, 101


def masks() -> tuple[RowMasks, torch.Tensor]:
    """Of some rows, and the legal tokens [L, V] bool of all."""
    rng = np.random.default_rng(0)
    rows = np.array([0, 2, 3, 6])
    legal = np.ones((L, V), dtype=bool)
    legal[rows] = rng.random((len(rows), V)) < 0.3
    padded = np.zeros((len(rows), 128), dtype=bool)
    padded[:, :V] = legal[rows]
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    return RowMasks(rows, words), torch.from_numpy(legal)


@pytest.mark.parametrize("tile", [1, 3, L])
def test_what_is_illegal_is_excluded(tile: int) -> None:
    logits = torch.randn(L, V, generator=torch.Generator().manual_seed(0))
    row_masks, legal = masks()
    expected = torch.where(legal, logits, ILLEGAL_LOGIT)
    for first in range(0, L, tile):
        row_masks.exclude_(logits[first : first + tile], first)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_candidates_are_legal_where_sampling_parameters_leave_nothing() -> None:
    logits = torch.full((L, V), MASKED_LOGIT)
    row_masks, legal = masks()
    row_masks.exclude_(logits, 0)
    probabilities = (logits / 0.4).softmax(dim=-1)
    assert (probabilities[~legal] == 0).all() and (probabilities[legal] > 0).all()
