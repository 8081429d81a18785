"""Where the canvases of a batch find their queries and keys."""

from dataclasses import dataclass

import numpy as np
import torch

from attention_kernels.masks import visible, visible_range
from vllm_dllm.cpu.attention.cuts import Image


@dataclass(frozen=True)
class CanvasLayout:
    """Where the n reference-rule canvases of a batch, or one of its images, find their queries and
    keys, by position. It is the same for all layers with the same window and block size.

    Q = longest canvas (tokens), B = most cache blocks any canvas sees, K <= B * block_size = keys.
    """

    selected: np.ndarray  # [n] int64, the canvases' indices in the batch
    query_len: int  # Q
    rows: torch.Tensor | None  # [n, Q] int64, query row of each canvas position (clamped past its
    # end); None: the canvases are the batch, all of one length
    valid_rows: torch.Tensor | None  # entries of flattened `rows` that are canvas positions
    block_columns: np.ndarray  # [n, B] int64, columns of the block table
    keys: slice  # the K keys of those blocks that any canvas sees
    bias: torch.Tensor | None  # [n, 1, 1, 1 or Q, K] fp32, 0 for a visible key, else -inf; None:
    # all are
    only_canvases: bool  # the batch holds no other requests

    @classmethod
    def build(
        cls,
        selected: np.ndarray,  # [n] int64
        query_start_loc: np.ndarray,  # [num_reqs + 1]
        seq_lens: np.ndarray,  # [num_reqs]
        block_size: int,
        window_left: int,  # tokens of context a canvas sees
    ) -> "CanvasLayout":
        starts = query_start_loc[selected]
        query_lens = query_start_loc[selected + 1] - starts
        query_len = int(query_lens.max())
        only_canvases = len(selected) == len(seq_lens)
        rows = valid_rows = None
        if not only_canvases or query_lens.min() != query_len:
            steps = np.arange(query_len)
            real = steps < query_lens[:, None]
            rows = torch.from_numpy((starts[:, None] + np.where(real, steps, 0)).astype(np.int64))
            valid_rows = torch.from_numpy(np.flatnonzero(real))

        ends = seq_lens[selected]
        context_lens, seq_ends = torch.from_numpy(ends - query_lens), torch.from_numpy(ends)
        first_keys = visible_range(
            first_query=context_lens,
            last_query=seq_ends - 1,
            context_len=context_lens,
            seq_len=seq_ends,
            causal=False,
            window_left=window_left,
        )[0].numpy()
        first_blocks = first_keys // block_size
        last_steps = (ends - 1) // block_size - first_blocks
        block_steps = np.minimum(np.arange(last_steps.max() + 1), last_steps[:, None])
        # From here on, positions count from the first block of each canvas.
        first_seen, end_seen = (
            first_keys - first_blocks * block_size,
            ends - first_blocks * block_size,
        )
        keys = slice(int(first_seen.min()), int(end_seen.max()))
        bias = None
        if first_seen.max() != keys.start or end_seen.min() != keys.stop:
            positions = np.arange(keys.start, keys.stop)
            seen = (positions >= first_seen[:, None]) & (positions < end_seen[:, None])
            bias = _bias(torch.from_numpy(seen))[:, None, None, None, :]
        return cls(
            selected=selected,
            query_len=query_len,
            rows=rows,
            valid_rows=valid_rows,
            block_columns=first_blocks[:, None] + block_steps,
            keys=keys,
            bias=bias,
            only_canvases=only_canvases,
        )

    @classmethod
    def of_image(cls, image: Image, block_size: int, window_left: int) -> "CanvasLayout":
        num_rows = image.rows.stop - image.rows.start
        query_pos = torch.arange(image.end - num_rows, image.end)[:, None]
        first_key = min(image.first_key, max(image.end - num_rows - window_left, 0))
        first_block, last_block = first_key // block_size, (image.end - 1) // block_size
        shift = first_block * block_size
        seen = visible(
            query_pos,
            torch.arange(first_key, image.end),
            context_len=image.end - num_rows,
            causal=True,
            window_left=window_left,
            spans=torch.tensor((image.first_key, image.end)).expand(num_rows, 1, 2),
        )
        return cls(
            selected=np.array([image.request]),
            query_len=num_rows,
            rows=torch.arange(image.rows.start, image.rows.stop)[None],
            valid_rows=torch.arange(num_rows),
            block_columns=np.arange(first_block, last_block + 1)[None],
            keys=slice(first_key - shift, image.end - shift),
            bias=_bias(seen)[None, None, None],
            only_canvases=False,
        )


def _bias(seen: torch.Tensor) -> torch.Tensor:
    """What is added to scores: 0 where a key is seen, else minus infinity."""
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)


@dataclass(frozen=True)
class CanvasKeys:
    """A layout and the cache blocks that hold its keys in one KV cache group."""

    layout: CanvasLayout
    blocks: torch.Tensor  # [n, B] int64

    @classmethod
    def build(
        cls,
        layout: CanvasLayout,
        block_table: np.ndarray,  # [num_reqs, max_blocks]
    ) -> "CanvasKeys":
        blocks = block_table[layout.selected[:, None], layout.block_columns]
        return cls(layout, torch.from_numpy(blocks.astype(np.int64)))
