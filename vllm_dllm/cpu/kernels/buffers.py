"""Native version of the kernel of `vllm/v1/worker/gpu/buffer_utils.py`."""

import torch

from vllm_dllm.cpu.kernels.memory import int32_at

Grid = tuple[int, ...]


def apply_write(
    grid: Grid,  # (num_writes, parts of the longest); the second since 0.33
    output: torch.Tensor,  # the array written to; with groups: [num_groups] uint64 addresses
    output_stride: int | torch.Tensor,  # elements per row; with groups: [num_groups] int64
    write_indices: torch.Tensor,  # [num_writes] int32, row
    write_starts: torch.Tensor,  # [num_writes] int32, first column
    write_contents: torch.Tensor,  # the values of all writes, one after the other
    write_cu_lens: torch.Tensor,  # [num_writes] int32, end of each write in `write_contents`
    write_group_ids: torch.Tensor | None,  # [num_writes] int32
    MULTI_GROUP: bool,
    **block_sizes: int,
) -> None:
    """Writes runs of values into rows of an array, or of one int32 array per KV-cache group."""
    num_writes = grid[0]
    contents = write_contents.numpy()
    rows = write_indices.tolist()[:num_writes]
    starts = write_starts.tolist()[:num_writes]
    ends = write_cu_lens.tolist()[:num_writes]
    if MULTI_GROUP:
        assert write_group_ids is not None and isinstance(output_stride, torch.Tensor)
        addresses, strides = output.tolist(), output_stride.tolist()
        groups = write_group_ids.tolist()[:num_writes]
    else:
        flat, stride = output.view(-1).numpy(), output_stride
    begin = 0
    for i, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
        if MULTI_GROUP:
            stride = strides[groups[i]]
            first = addresses[groups[i]] + 4 * (row * stride + start)
            int32_at(first, end - begin)[:] = contents[begin:end]
        else:
            flat[row * stride + start :][: end - begin] = contents[begin:end]
        begin = end
