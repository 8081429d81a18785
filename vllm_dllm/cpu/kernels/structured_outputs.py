"""Native version of the kernel of `vllm/v1/worker/gpu/structured_outputs.py`."""

import numpy as np
import torch

Grid = tuple[int, ...]


def apply_grammar_bitmask(
    grid: Grid,  # (num_masks, ...)
    logits: torch.Tensor,  # [num_logits, V], -inf is written where a token is forbidden
    logits_stride: int,
    logits_indices: torch.Tensor,  # [num_masks] int32: request * MASK_STRIDE + row in the request
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32
    bitmask: torch.Tensor,  # [num_masks, ceil(V / 32)] int32, 1 = allowed, lowest bit first
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    **block_sizes: int,
) -> None:
    bounds = cu_num_logits.tolist()
    packed = bitmask.numpy().view(np.uint8)
    for mask, index in enumerate(logits_indices.tolist()[: grid[0]]):
        request, position = divmod(index, MASK_STRIDE)
        row = bounds[request] + position
        if row < bounds[request + 1]:
            allowed = np.unpackbits(packed[mask], count=vocab_size, bitorder="little")
            logits[row].masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)
