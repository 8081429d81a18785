"""The tensors that attention reads: requests and the pages of their keys and values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """N requests with T queries in all, and the paged cache of their tokens. The cache already
    holds the queries' own keys and values."""

    query: torch.Tensor  # [T, Hq, D] fp16, bf16 or fp32, the queries of all requests in turn
    key_cache: torch.Tensor  # [num_blocks, block_size, Hkv, D] query's dtype or fp8 e4m3
    value_cache: torch.Tensor  # like key_cache
    block_table: torch.Tensor  # [N, max_blocks] int32, page of each block of a request
    query_start_loc: torch.Tensor  # [N + 1] int32, first row of each request
    seq_lens: torch.Tensor  # [N] int32, context and queries together
    causal: torch.Tensor  # [N] int32, see `masks`
    symmetric: torch.Tensor  # [N] int32, window rule: 1 = `symmetric`, 0 = `reference`
    spans: torch.Tensor | None = None  # [T, 2] int32, first key and end of each query's image;
    # None: no images

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return len(self.query) == 0 or len(self.seq_lens) == 0

    def check_strides(self, impl: str, output: torch.Tensor) -> None:
        """Raises ValueError for gaps where the kernels of `impl` read or write one number after
        another: along the last dimension of any tensor, and everywhere in `spans`."""
        tensors = vars(self) | {"output": output, "window_rule": self.symmetric}
        for name, tensor in tensors.items():
            if name in ("symmetric", "spans"):
                continue
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise ValueError(
                    f"impl {impl!r} takes a {name} that is contiguous along its last dimension, "
                    f"got strides {tensor.stride()} for shape {tuple(tensor.shape)}: pass a "
                    f"contiguous copy"
                )
        if self.spans is not None and not self.spans.is_contiguous():
            raise ValueError(
                f"impl {impl!r} takes contiguous spans, got strides {self.spans.stride()} for "
                f"shape {tuple(self.spans.shape)}: pass a contiguous copy"
            )
