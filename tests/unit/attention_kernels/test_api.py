"""What `attention` says of arguments that do not fit and of GPUs that cannot do a case, and that it
goes by their meaning."""

import re
import sys
from typing import Any

import pytest
import torch

from attention_kernels.api import attention, import_fa4
from attention_kernels.support import FP8, Case, fa4_reason, triton_reason
from attention_kernels.testing import PagedBatch, Request


@pytest.fixture
def batch() -> PagedBatch:
    return PagedBatch.random(
        [Request(4, 30), Request(3, 9, causal=True)],
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        block_size=16,
    )


def call(batch: PagedBatch, **changes: Any) -> torch.Tensor:
    return attention(**{**batch.arguments(), "scale": 0.3, "impl": "reference", **changes})


def test_rule_by_name_or_by_request(batch: PagedBatch) -> None:
    named = call(batch, window_left=2, window_rule="symmetric")
    assert torch.equal(named, call(batch, window_left=2, window_rule=torch.ones_like(batch.causal)))
    assert not torch.equal(named, call(batch, window_left=2, window_rule="reference"))


def test_writes_where_it_is_told(batch: PagedBatch) -> None:
    output = torch.full_like(batch.query, torch.nan)
    assert call(batch, output=output) is output
    assert torch.equal(output, call(batch))


@pytest.fixture
def no_requests(batch: PagedBatch) -> dict[str, Any]:
    return {
        "block_table": batch.block_table[:0],
        "query_start_loc": batch.query_start_loc[:1],
        "window_rule": "reference",
        "seq_lens": batch.seq_lens[:0],
        "causal": batch.causal[:0],
    }


def test_no_queries_and_no_requests(batch: PagedBatch, no_requests: dict[str, Any]) -> None:
    assert call(batch, query=batch.query[:0], **no_requests).shape == (0, 4, 16)
    assert (call(batch, **no_requests) == 0).all()
    for others in ({}, no_requests):  # the implementation is checked all the same
        empty = {"query": batch.query[:0]} | others
        with pytest.raises(ValueError, match=r"impl must be .*, got 'cutlass'"):
            call(batch, **empty, impl="cutlass")
        with pytest.raises(ValueError, match="impl 'fa4' takes tensors on a GPU, got query on cpu"):
            call(batch, **empty, impl="fa4")


CASES: dict[str, tuple[Any, str]] = {
    "query": (torch.zeros(7, 64), r"query must have 3 dimensions, got shape \(7, 64\)"),
    "key_cache": (torch.zeros(6, 16, 2, 8), r"key_cache must have shape \(6, 16, 2, 16\), got"),
    "value_cache": (torch.zeros(6, 16, 1, 16), r"value_cache must have shape"),
    "block_table": (torch.zeros(2, 3), "block_table must have dtype torch.int32, got torch.f"),
    "query_start_loc": (torch.zeros(2, dtype=torch.int32), r"query_start_loc must have shape \(3"),
    "seq_lens": (torch.zeros(2, dtype=torch.int64), "seq_lens must have dtype torch.int32"),
    "causal": (torch.zeros(3, dtype=torch.int32), r"causal must have shape \(2,\), got \(3,\)"),
    "window_rule": ("two-sided", "window_rule must be 'reference', 'symmetric' or a tensor"),
    "spans": (torch.zeros(7, dtype=torch.int32), r"spans must have shape \(7, 2\), got \(7,\)"),
    "softcap": (-1.0, r"softcap must be at least 0 \(none\), got -1.0"),
    "key_scale": (torch.tensor([1], dtype=torch.int32), "key_scale must have dtype torch.float32"),
    "output": (torch.zeros(7, 4, 16, dtype=torch.half), "output must have dtype torch.float32"),
    "impl": ("cutlass", "impl must be 'triton', 'fa4' or 'reference', got 'cutlass'"),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_name_the_argument(batch: PagedBatch, name: str) -> None:
    value, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call(batch, **{name: value})


@pytest.mark.parametrize("name", ["key_cache", "value_cache", "seq_lens", "causal", "window_rule"])
def test_devices_must_fit(batch: PagedBatch, name: str) -> None:
    elsewhere = {name: batch.arguments()[name].to("meta")}
    with pytest.raises(ValueError, match=f"{name} must have query's device cpu, got meta"):
        call(batch, **elsewhere)


def test_dtypes_and_groups_must_fit(batch: PagedBatch) -> None:
    half = {name: getattr(batch, name).half() for name in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match=r"key_cache must have the query's dtype torch.float32 or"):
        call(batch, **half)
    with pytest.raises(ValueError, match="query must be float16, bfloat16 or float32, got"):
        call(batch, query=batch.query.double())
    with pytest.raises(ValueError, match="query has 3 heads, which is not a multiple of key_cache"):
        call(batch, query=batch.query[:, :3].contiguous())


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attention_kernels.fa4_fwd", None)
    with pytest.raises(ImportError, match=r"flash-attn-4 .*pip install 'vllm-dllm\[fa4\]'"):
        import_fa4()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REASONS = {  # case: what Triton and FlashAttention-4 say of it
    Case((9, 0), 256, BF16, BF16): (None, None),
    Case((9, 0), 512, BF16, BF16): (None, r"head sizes .* on sm_90, got query with 512"),
    Case((9, 0), 96, BF16, BF16): (None, r"head sizes .* on sm_90, got query with 96"),
    Case((10, 0), 256, FP16, FP16): (None, None),
    Case((10, 0), 192, BF16, BF16): (None, r"head sizes .* on sm_100, got query with 192"),
    Case((10, 0), 512, BF16, BF16): (None, r"head sizes .* on sm_100, got query with 512"),
    Case((9, 0), 256, BF16, FP8): (None, r"a key_cache of the query's dtype torch.bfloat16"),
    Case((9, 0), 64, FP32, FP32): (None, r"float16 and bfloat16, got query with torch.float32"),
    Case((8, 0), 64, BF16, BF16): (None, r"9.x, 10.x\), got sm_80"),
    Case((8, 0), 64, BF16, FP8): (r"compute capability 8.9 and up, got sm_80", r"got sm_80"),
    Case((12, 0), 64, BF16, BF16): (None, r"got sm_120"),
    Case((7, 5), 64, FP16, FP16): (r"compute capability 8.0 and up, got sm_75", r"got sm_75"),
    Case((9, 0), 8, BF16, BF16): (r"head sizes from 16 to 512, got query with 8", r"head sizes .*"),
}


@pytest.mark.parametrize("case", REASONS, ids=str)
def test_says_what_a_chip_cannot_do(case: Case) -> None:

    for reason, expected in zip(
        (triton_reason(case), fa4_reason(case)), REASONS[case], strict=True
    ):
        if expected is None:
            assert reason is None
        else:
            assert reason is not None and re.search(expected, reason), reason
