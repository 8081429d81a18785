"""Batches for tests and benches of attention: paged caches of random requests, NaN elsewhere.

A NaN in an output means that a kernel read what it was not given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attention_kernels import reference
from attention_kernels.batch import Batch
from attention_kernels.rounding import FEW, dot_error, row_error, sum_error, unit_roundoff


class Request(NamedTuple):
    """One request of a batch."""

    query_len: int  # tokens
    context_len: int  # tokens before them
    causal: int = False  # see `masks`
    symmetric: bool = False
    images: tuple[tuple[int, int], ...] = ()  # first key and end of each; they do not overlap

    def spans(self) -> torch.Tensor:
        """Returns [query_len, 2] int32: first key and end of each query's image."""
        spans = torch.zeros(self.query_len + self.context_len, 2, dtype=torch.int32)
        for first, end in self.images:
            assert 0 <= first < end <= len(spans)
            spans[first:end] = torch.tensor((first, end))
        return spans[self.context_len :]


class PagedBatch(Batch):
    """A batch that tests and benches make and change."""

    @classmethod
    def random(
        cls,
        requests: Sequence[Request],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> "PagedBatch":
        """Returns a batch of normally distributed queries, keys and values, with pages in random
        order and NaN in the cache outside of requests."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        query_lens = torch.tensor([request.query_len for request in requests])
        seq_lens = query_lens + torch.tensor([request.context_len for request in requests])
        num_pages = (seq_lens + block_size - 1) // block_size
        max_blocks = max(1, int(num_pages.max()))
        total = int(num_pages.sum()) + 2
        pages = torch.randperm(total, generator=generator, device=device)
        # An entry past a request's end points nowhere, so following it fails.
        block_table = torch.full((len(requests), max_blocks), 1 << 30, device=device)
        cache_shape = (len(pages), block_size, num_kv_heads, head_size)
        caches = [torch.full(cache_shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
        for r, length in enumerate(seq_lens.tolist()):
            own = pages[num_pages[:r].sum() : num_pages[: r + 1].sum()]
            block_table[r, : len(own)] = own
            position = torch.arange(length, device=device)
            for cache in caches:
                cache[own[position // block_size], position % block_size] = normal(
                    length, num_kv_heads, head_size
                )

        def int32(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, device=device).to(torch.int32)

        return cls(
            query=normal(int(query_lens.sum()), num_heads, head_size),
            key_cache=caches[0],
            value_cache=caches[1],
            block_table=int32(block_table),
            query_start_loc=int32(torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))),
            seq_lens=int32(seq_lens),
            causal=int32([request.causal for request in requests]),
            symmetric=int32([request.symmetric for request in requests]),
            spans=(
                int32(torch.cat([request.spans() for request in requests]))
                if any(request.images for request in requests)
                else None
            ),
        )

    def arguments(self) -> dict[str, Any]:
        """Returns the batch as keyword arguments of `api.attention`."""
        tensors = dict(vars(self))
        return {"window_rule": tensors.pop("symmetric"), **tensors}

    def to(self, device: str | torch.device) -> "PagedBatch":
        """Returns a copy of the batch on `device`."""
        tensors = vars(self).items()
        return PagedBatch(**{n: tensor.to(device) for n, tensor in tensors if tensor is not None})

    def reference(self, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        """Returns the result of `reference.attention` [T, Hq, D] for the same numbers in
        `dtype`."""
        batch = replace(
            self,
            query=self.query.to(dtype),
            key_cache=self.key_cache.to(dtype),
            value_cache=self.value_cache.to(dtype),
        )
        return reference.attention(batch, **options)

    def probe(self, first_key: int) -> "PagedBatch":
        """Returns a batch with zero queries, and one-hot values at the D keys from position
        `first_key` on. An output [T, Hq, D] is above zero exactly where the query sees the key."""
        values = self.value_cache.clone()
        _, block_size, _, head_size = values.shape
        for r, length in enumerate(self.seq_lens.tolist()):
            position = torch.arange(length)
            page = self.block_table[r, position // block_size].long()
            channel = position[:, None] - first_key == torch.arange(head_size)
            values[page, position % block_size] = channel[:, None].to(values.dtype)
        return replace(self, query=torch.zeros_like(self.query), value_cache=values)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers with gaps along the last dimension. The gaps hold wrong numbers."""
    wrong = torch.full_like(tensor, 1 if tensor.dtype == torch.int32 else torch.nan)
    return torch.stack((tensor, wrong), dim=-1)[..., 0]


def rms_ratio(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the root mean square of the error divided by that of `expected`, for each row of the
    last axis."""
    error = (output.double() - expected.double()).square().mean(-1).sqrt()
    return error / expected.double().square().mean(-1).sqrt().clamp(min=1e-12)


@dataclass(frozen=True)
class Allowed:
    """The right result of attention over a batch, and the error that rounding may cause."""

    expected: torch.Tensor  # [T, Hq, D] float64
    error: torch.Tensor  # [T, Hq, D] float64, of each element
    row_ratio: float  # `rms_ratio` of the worst row

    def check(self, output: torch.Tensor, rows: slice | torch.Tensor = slice(None)) -> None:
        """Raises AssertionError unless `rows` of `output` are right. A NaN is wrong."""
        off = (output[rows].double() - self.expected[rows]).abs()
        share = (off / self.error[rows].clamp(min=1e-300)).max().item()
        assert share <= 1, f"an element is off by {share:.2f} times what rounding allows"
        ratio = rms_ratio(output[rows], self.expected[rows]).max().item()
        assert ratio <= self.row_ratio, (
            f"the worst row's RMS ratio is {ratio:.2e}, rounding allows {self.row_ratio:.2e}"
        )


def allowed(batch: PagedBatch, *, scale: float, cuts_off: bool = False, **options: Any) -> Allowed:
    """Returns the right result with `options` of `reference.attention`, and the error allowed.

    Scores and sums are fp32. Rounding a score moves its weight by as much, and the sum of weights
    by at most as much again. With a 16-bit query, weights and output are also rounded. With
    `cuts_off` they are rounded towards zero, which is off by up to twice as much.
    """
    dtype = batch.query.dtype
    query_norm = batch.query.double().norm(dim=-1).max().item()
    key_norm = batch.key_cache.double().nan_to_num().norm(dim=-1).max().item()
    if options.get("key_scale") is not None:
        key_norm *= options["key_scale"].item()
    num_keys = int(batch.seq_lens.max())
    # Scaled, capped and, over shares of the keys, joined by the logarithm of their sum.
    largest_score = scale * query_norm * key_norm
    score = dot_error() * largest_score + FEW / 2 * unit_roundoff(torch.float32) * (
        largest_score + math.log2(num_keys)
    )
    weight = 2 * score + 2 * sum_error(num_keys) + FEW * unit_roundoff(torch.float32)
    is_16_bit = dtype != torch.float32
    roundings = 2 if cuts_off and is_16_bit else 1
    rounded = roundings * unit_roundoff(dtype) if is_16_bit else 0.0
    expected = batch.reference(torch.float64, scale=scale, **options)
    magnitudes = replace(batch, value_cache=batch.value_cache.float().abs())
    return Allowed(
        expected=expected,
        error=(weight + rounded) * magnitudes.reference(torch.float64, scale=scale, **options)
        + roundings * unit_roundoff(dtype) * expected.abs(),
        row_ratio=2 * weight + (roundings * row_error(dtype) if is_16_bit else 0.0),
    )
