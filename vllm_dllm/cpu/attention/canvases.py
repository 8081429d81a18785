"""Attention of canvases over keys that all of their rows see, as two matrix products; and where
these rows and keys are in the batch and the cache."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from attention_kernels.masks import visible, visible_range
from vllm_dllm.cpu.compat.ops import write_cpu_kv_cache


@dataclass(frozen=True)
class Image:
    """Rows of a batch that belong to one image."""

    request: int  # index of the new request
    rows: slice  # rows of the batch; fewer than its keys if the cache already holds the first ones
    first_key: int  # position
    end: int  # position after its last key


@dataclass(frozen=True)
class CanvasLayout:
    """Positions of the queries and keys of a batch's n reference-rule canvases, of one image, or of
    the second copies of n blocks that are verified. It is the same for all layers with the same
    window and block size.

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
        block_size: int,  # tokens of a cache block
        window_left: int,  # tokens of context a canvas sees
    ) -> "CanvasLayout":
        """Returns the layout of `selected` requests. `seq_lens`: with the rows of the step."""
        starts, ends = query_start_loc[selected], seq_lens[selected]
        query_lens = query_start_loc[selected + 1] - starts
        context_lens, seq_ends = torch.from_numpy(ends - query_lens), torch.from_numpy(ends)
        first_keys = visible_range(
            first_query=context_lens,
            last_query=seq_ends - 1,
            context_len=context_lens,
            seq_len=seq_ends,
            causal=False,
            window_left=window_left,
        )[0].numpy()
        layout = cls._lay_out(selected, starts, query_lens, first_keys, ends, block_size)
        if len(selected) < len(seq_lens):
            return layout
        if query_lens.min() == layout.query_len:
            return replace(layout, rows=None, valid_rows=None, only_canvases=True)
        return replace(layout, only_canvases=True)

    @classmethod
    def build_for_image(cls, image: Image, block_size: int, window_left: int) -> "CanvasLayout":
        """Returns the layout of one image's rows. They see each other, and the keys that a causal
        row sees within `window_left` tokens."""
        num_rows = image.rows.stop - image.rows.start
        context_len = image.end - num_rows
        first_key = min(image.first_key, max(context_len - window_left, 0))
        seen = visible(
            torch.arange(context_len, image.end)[:, None],
            torch.arange(first_key, image.end),
            context_len=context_len,
            causal=True,
            window_left=window_left,
            spans=torch.tensor((image.first_key, image.end)).expand(num_rows, 1, 2),
        )
        request, start, length, first, end = (
            np.array([number])
            for number in (image.request, image.rows.start, num_rows, first_key, image.end)
        )
        return cls._lay_out(request, start, length, first, end, block_size, seen[None])

    @classmethod
    def build_for_copies(
        cls,
        causal: np.ndarray,  # [num_reqs], see `attention_kernels.masks`
        query_start_loc: np.ndarray,  # [num_reqs + 1]
        seq_lens: np.ndarray,  # [num_reqs]
        block_size: int,  # tokens of a cache block
    ) -> "CanvasLayout | None":
        """Returns the layout of the second copies that a step verifies; None if there are none."""
        context_lens = seq_lens - np.diff(query_start_loc)
        length = np.maximum(-causal, 1)
        firsts = (context_lens // length + 1) * length  # positions where the copies begin
        selected = np.flatnonzero((causal < 0) & (firsts < seq_lens))
        if len(selected) == 0:
            return None
        firsts, ends, context_lens = firsts[selected], seq_lens[selected], context_lens[selected]
        lengths = ends - firsts
        steps = np.arange(lengths.max())
        query_pos = firsts[:, None] + np.where(steps < lengths[:, None], steps, 0)
        seen = visible(
            torch.from_numpy(query_pos)[:, :, None],
            torch.arange(int(ends.max())),
            torch.from_numpy(context_lens)[:, None, None],
            torch.from_numpy(causal[selected])[:, None, None],
            window_left=-1,
        )
        starts = query_start_loc[selected] + firsts - context_lens
        return cls._lay_out(selected, starts, lengths, 0 * firsts, ends, block_size, seen)

    @classmethod
    def _lay_out(
        cls,
        selected: np.ndarray,  # [n] int64
        starts: np.ndarray,  # [n] query row of each canvas' first position
        query_lens: np.ndarray,  # [n]
        first_keys: np.ndarray,  # [n] position of the first key it sees
        ends: np.ndarray,  # [n] position after the last one
        block_size: int,
        seen: torch.Tensor | None = None,  # [n, Q, K] bool; None: all rows see all of these keys
    ) -> "CanvasLayout":
        """Returns the layout of canvases that are not the whole batch."""
        steps = np.arange(query_lens.max())
        real = steps < query_lens[:, None]
        first_blocks = first_keys // block_size
        last_steps = (ends - 1) // block_size - first_blocks
        block_steps = np.minimum(np.arange(last_steps.max() + 1), last_steps[:, None])
        # From here on, positions count from the first block of each canvas.
        first_seen, end_seen = (at - first_blocks * block_size for at in (first_keys, ends))
        keys = slice(int(first_seen.min()), int(end_seen.max()))
        if seen is None and (first_seen.max() != keys.start or end_seen.min() != keys.stop):
            positions = np.arange(keys.start, keys.stop)
            in_range = (positions >= first_seen[:, None]) & (positions < end_seen[:, None])
            seen = torch.from_numpy(in_range)[:, None]
        return cls(
            selected=selected,
            query_len=len(steps),
            rows=torch.from_numpy((starts[:, None] + np.where(real, steps, 0)).astype(np.int64)),
            valid_rows=torch.from_numpy(np.flatnonzero(real)),
            block_columns=first_blocks[:, None] + block_steps,
            keys=keys,
            bias=None if seen is None else _to_bias(seen)[:, None, None],
            only_canvases=False,
        )

    def find_blocks(self, block_table: torch.Tensor) -> torch.Tensor:
        """Returns the cache blocks [n, B] int64 that hold the keys in one KV cache group.
        `block_table`: the group's, [num_reqs, max_blocks]."""
        blocks = block_table.numpy()[self.selected[:, None], self.block_columns]
        return torch.from_numpy(blocks.astype(np.int64))


def _to_bias(seen: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 bias of scores, shaped like `seen`: 0 for a visible key, else -inf."""
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def attend_canvases(
    query: torch.Tensor,  # [T, Hq, D]
    kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * D]
    layout: CanvasLayout,
    blocks: torch.Tensor,  # [n, B] int64, that hold its keys
    scale: float,
    output: torch.Tensor,  # [T, Hq, D], written at the canvases' rows
    softcap: float = 0.0,  # scores become softcap * tanh(score / softcap); 0 = none
) -> None:
    """Writes the attention of a layout's rows to `output`, whose other rows stay as they are."""
    n, Q = len(layout.selected), layout.query_len
    Hq, D = query.shape[1:]
    keys, values = _gather_blocks(kv_cache, blocks, layout.keys)
    Hkv = keys.shape[1]
    # The heads of a group share their keys, and the mask does not depend on the row: fold the
    # group's heads into the row axis.
    own = query[: n * Q] if layout.rows is None else query[layout.rows]
    grouped = own.view(n, Q, Hkv, Hq // Hkv, D).permute(0, 2, 3, 1, 4)
    # fp32, as in vLLM's kernel: rounding scores to bf16 changes rows by up to 2%.
    scores = torch.matmul(grouped.reshape(n, Hkv, -1, D).float() * scale, keys.float())
    if softcap > 0:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if layout.bias is not None:
        scores.view(n, Hkv, Hq // Hkv, Q, -1).add_(layout.bias)
    probs = torch.softmax(scores, dim=-1).to(values.dtype)
    attended = torch.matmul(probs, values).view(n, Hkv, Hq // Hkv, Q, D)
    by_row = attended.permute(0, 3, 1, 2, 4)
    if layout.rows is None:
        output[: n * Q].view(n, Q, Hkv, Hq // Hkv, D).copy_(by_row)
    else:
        flat_rows = layout.rows.view(-1)[layout.valid_rows]
        output[flat_rows] = by_row.reshape(n * Q, Hq, D)[layout.valid_rows]


def _gather_blocks(
    kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * D]
    blocks: torch.Tensor,  # [n, B] int64
    positions: slice,  # K positions, counted from the first block's
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns copies of the transposed keys [n, Hkv, D, K] and the values [n, Hkv, K, D] at
    `positions`.

    vLLM's kernel stores the keys of a block and head transposed, then the values as they are.
    """
    num_blocks, Hkv, block_size, width = kv_cache.shape
    D = width // 2
    n, B = blocks.shape
    keys = kv_cache.view(num_blocks, Hkv, 2, D, block_size)[:, :, 0][blocks]
    values = kv_cache.view(num_blocks, Hkv, 2, block_size, D)[:, :, 1][blocks]
    return (
        keys.permute(0, 2, 3, 1, 4).reshape(n, Hkv, D, B * block_size)[..., positions],
        values.permute(0, 2, 1, 3, 4).reshape(n, Hkv, B * block_size, D)[:, :, positions],
    )


def check_cache_layout(isa: str, dtype: torch.dtype, block_size: int) -> None:
    """Checks that `_gather_blocks` can read this processor's KV cache: writes one block as vLLM
    does and reads it back. `isa`: the kernels in use, "vec" or "amx".

    Raises:
        ValueError: these kernels have another cache layout.
    """
    Hkv, D = 2, 64
    cache = torch.zeros(1, Hkv, block_size, 2 * D, dtype=dtype)
    halves = cache.view(1, Hkv, 2 * block_size, D).chunk(2, dim=2)
    keys = torch.arange(block_size * Hkv * D).view(block_size, Hkv, D).remainder(251).to(dtype)
    slots = torch.arange(block_size)
    write_cpu_kv_cache(
        keys, -keys, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    first = torch.zeros(1, 1, dtype=torch.int64)
    read_keys, read_values = _gather_blocks(cache, first, slice(0, block_size))
    has_values = torch.equal(read_values[0].transpose(0, 1), -keys)
    if not (has_values and torch.equal(read_keys[0].permute(2, 0, 1), keys)):
        raise ValueError(
            f"The reference window rule and verified drafts on CPUs need a KV cache with "
            f"transposed keys per block, which the {isa!r} kernels do not have. Report this error, "
            f"with the output of `lscpu`."
        )
