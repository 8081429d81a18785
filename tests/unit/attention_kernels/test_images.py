"""Images in Triton: which tiles are visited. Visibility and numbers are in `test_triton.py`, where
some batches have images."""

import sys
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.interpreter import interpret_kernels
from attention_kernels.masks import visible, visible_range
from attention_kernels.testing import Request
from attention_kernels.tiling import images, key_range, with_images

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("here")]
ROWS = 16  # of a tile


@triton.jit
def range_kernel(
    spans,
    bounds,  # [2]
    first,  # query of the request
    num_rows,
    context_len,
    seq_len,
    causal,
    window_left,
    ROWS: tl.constexpr,
):
    first_pos = context_len + first
    last_pos = first_pos + num_rows - 1
    start, end = key_range(
        first_pos, last_pos, context_len, seq_len, causal, 0, window_left, VERIFIES=False
    )
    row = tl.arange(0, ROWS)
    image_start, image_end = images(spans, first + row, row < num_rows, seq_len)
    start, end = with_images(start, end, image_start, image_end)
    tl.store(bounds, start)
    tl.store(bounds + 1, end)


@pytest.fixture(scope="module")
def here(triton_version: ModuleType) -> None:
    if DEVICE == "cpu":
        interpret_kernels(sys.modules[__name__])


@st.composite
def prompts(draw: st.DrawFn) -> Request:
    """With images of any length anywhere."""
    query_len, context_len = draw(st.integers(1, 60)), draw(st.integers(0, 60))
    ends = draw(st.lists(st.integers(0, query_len + context_len), unique=True, max_size=8))
    pairs = list(zip(*[iter(sorted(ends))] * 2, strict=False))
    return Request(query_len, context_len, causal=True, images=tuple(pairs))


@settings(deadline=None, max_examples=200)
@given(request=prompts(), first=st.integers(0, 59), window_left=st.integers(-1, 70))
def test_visits_all_keys_that_are_seen_and_no_tile_without_one(
    request: Request, first: int, window_left: int
) -> None:
    query_len, context_len = request.query_len, request.context_len
    first = min(first, query_len - 1)
    num_rows = min(ROWS, query_len - first)
    seq_len, spans = context_len + query_len, request.spans()
    bounds = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    numbers = (first, num_rows, context_len, seq_len, 1, window_left)
    range_kernel[(1,)](spans.to(DEVICE), bounds, *numbers, ROWS=ROWS)
    start, end = bounds.tolist()
    own = spans[first : first + num_rows]
    query_pos = torch.arange(context_len + first, context_len + first + num_rows)
    seen = visible(
        query_pos[:, None], torch.arange(seq_len), context_len, 1, window_left, spans=own[:, None]
    ).any(dim=0)
    assert seen[start:end].all() and not seen[:start].any() and not seen[end:].any()
    by_definition = visible_range(
        query_pos[0], query_pos[-1], context_len, seq_len, 1, window_left, spans=own
    )
    assert [int(bound) for bound in by_definition] == [start, end]
