"""The CPU backend against the reference: vLLM's kernel and our canvas path."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from attention_kernels.testing import PagedBatch, allowed
from vllm_dllm.cpu.attention.canvases import (
    CanvasKeys,
    CanvasLayout,
    attend_canvases,
    check_cache_layout,
)

pytestmark = pytest.mark.numerics

current_platform.import_kernels()

BLOCK, HQ, HKV, D = 32, 4, 2, 64
SHAPES = {
    # (context, queries, bidirectional) of each request
    "alone": [(70, 16, 1)],
    "no-context": [(0, 16, 1)],
    "context-shorter-than-window": [(5, 16, 1)],
    "one-row": [(100, 1, 1)],
    "uneven-canvases": [(200, 16, 1), (3, 16, 1), (64, 7, 1)],
    "mixed": [(0, 50, 0), (90, 16, 1), (33, 16, 0), (400, 16, 1), (12, 1, 0)],
}


@pytest.mark.parametrize("window", [1, 2, 24, 64, 1000])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_reference_rule(name: str, window: int, dtype: torch.dtype) -> None:
    case = PagedCase(SHAPES[name], dtype)
    selected = np.flatnonzero(case.causal.numpy() == 0)
    layout = CanvasLayout.build(
        selected,
        case.query_start_loc.numpy(),
        case.seq_lens.numpy(),
        BLOCK,
        window_left=window - 1,
    )
    keys = CanvasKeys.build(layout, case.block_table.numpy())
    output = torch.full_like(case.query, torch.nan)
    attend_canvases(case.query, case.kv_cache, keys, 0.3, output)
    canvas_rows = ~torch.isnan(output).flatten(1).any(dim=1)
    assert canvas_rows.sum() == sum(queries for _, queries, canvas in SHAPES[name] if canvas)
    allowed(case.plain(), scale=0.3, window_left=window - 1).check(output, canvas_rows)
    assert layout.only_canvases == all(canvas for _, _, canvas in SHAPES[name])


@pytest.mark.parametrize("window", [24, 64, 1000])
@pytest.mark.parametrize("name", SHAPES)
def test_symmetric_rule_is_what_vllms_kernel_computes(name: str, window: int) -> None:
    case = PagedCase(SHAPES[name], torch.float32)
    output = case.vllm_kernel(window)
    allowed(case.plain(symmetric=True), scale=0.3, window_left=window - 1).check(output)


def test_layout_check_accepts_this_machine_and_names_what_it_refuses() -> None:
    check_cache_layout("vec", torch.float32, "auto", BLOCK)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8'"):
        check_cache_layout("vec", torch.float32, "fp8", BLOCK)


class PagedCase:
    """Random requests in a paged cache with shuffled pages; pages nobody owns hold NaN."""

    def __init__(self, requests: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        queries = torch.tensor([q for _, q, _ in requests])
        self.seq_lens = torch.tensor([c + q for c, q, _ in requests], dtype=torch.int32)
        self.causal = torch.tensor([1 - canvas for *_, canvas in requests], dtype=torch.int32)
        self.query_start_loc = torch.cat((torch.zeros(1), queries.cumsum(0))).int()
        blocks = (self.seq_lens + BLOCK - 1) // BLOCK
        self.block_table = torch.zeros(len(requests), int(blocks.max()), dtype=torch.int32)
        pages = torch.randperm(int(blocks.sum()) + 3, generator=generator).int()
        self.query = torch.randn(int(queries.sum()), HQ, D, generator=generator).to(dtype)
        self.kv_cache = torch.full((len(pages), HKV, BLOCK, 2 * D), torch.nan, dtype=dtype)
        self.plain_keys = torch.zeros(len(pages), BLOCK, HKV, D, dtype=torch.float64)
        self.plain_values = torch.zeros_like(self.plain_keys)
        halves = self.kv_cache.view(len(pages), HKV, 2 * BLOCK, D).chunk(2, dim=2)
        used = 0
        for i, length in enumerate(self.seq_lens.tolist()):
            count = int(blocks[i])
            self.block_table[i, :count] = pages[used : used + count]
            used += count
            self.kv_cache[self.block_table[i, :count].long()] = 0  # vLLM zeroes fresh blocks
            positions = torch.arange(length)
            owned = self.block_table[i, positions // BLOCK].long()
            keys, values = (
                torch.randn(length, HKV, D, generator=generator).to(dtype) for _ in range(2)
            )
            slots = owned * BLOCK + positions % BLOCK
            ops.cpu_attn_reshape_and_cache(
                keys, values, *halves, slots, "vec", k_scale=1.0, v_scale=1.0,
                kv_cache_dtype="auto",
            )  # fmt: skip
            self.plain_keys[owned, positions % BLOCK] = keys.double()
            self.plain_values[owned, positions % BLOCK] = values.double()

    def plain(self, symmetric: bool = False) -> PagedBatch:
        """The same requests in the layout of the definition."""
        return PagedBatch(
            self.query,
            self.plain_keys,
            self.plain_values,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            self.causal,
            torch.full_like(self.causal, int(symmetric)),
        )

    def vllm_kernel(self, window: int) -> torch.Tensor:
        shared = SimpleNamespace(
            query_start_loc=self.query_start_loc, seq_lens=self.seq_lens, causal=False
        )
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.seq_lens),
            num_heads=HQ,
            num_kv_heads=HKV,
            head_dim=D,
            dtype=self.query.dtype,
            sliding_window_size=window,
            isa="vec",
            enable_kv_split=True,
            dynamic_causal=self.causal,
            kv_cache_dtype="auto",
            **vars(shared),
        )
        output = torch.full_like(self.query, torch.nan)
        halves = self.kv_cache.view(len(self.kv_cache), HKV, 2 * BLOCK, D).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=halves[0],
            value_cache=halves[1],
            output=output,
            scale=0.3,
            alibi_slopes=None,
            sliding_window=window,
            block_table=self.block_table,
            softcap=0,
            scheduler_metadata=metadata,
            s_aux=None,
            dynamic_causal=self.causal,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
            **vars(shared),
        )
        return output
