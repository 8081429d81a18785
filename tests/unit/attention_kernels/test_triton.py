"""The Triton version: who sees whom, exactly; numbers, against float64; its limits.

Without a GPU it runs in Triton's interpreter, in fp32 and fp16 (bf16 is multiplied wrongly there).
"""

from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.api import FP8, attention
from attention_kernels.batch import Batch
from attention_kernels.masks import visible, visible_range
from attention_kernels.testing import PagedBatch, Request, allowed
from attention_kernels.tiling import key_range
from tests.unit.attention_kernels.batches import MIXES, VERIFIED, small_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("triton_version")]

WINDOWS = [-1, 0, 1, 15, 200]
# Every mix with every window, and both with every page size: two sizes each, in turn; `make test`
# tries the smaller.
VISIBILITY = [
    pytest.param(
        *(mix, window_left, page),
        id=f"{mix}-window{window_left}-page{page}",
        marks=[pytest.mark.slow] * (page > 32),
    )
    for (m, mix), (w, window_left) in product(enumerate(MIXES), enumerate(WINDOWS))
    for page in ((16, 64) if (m + w) % 2 == 0 else (32, 128))
]


def seen_by_definition(batch: PagedBatch, window_left: int, first_key: int) -> torch.Tensor:
    """[T, D] bool: visibility of the D keys from `first_key` on, by `masks.visible`."""
    D = batch.query.shape[-1]
    rows = []
    for r, length in enumerate(batch.seq_lens.tolist()):
        first_row, end_row = batch.query_start_loc[r : r + 2].tolist()
        query_len = end_row - first_row
        key_pos = torch.arange(first_key, first_key + D)
        seen = visible(
            torch.arange(length - query_len, length)[:, None],
            key_pos,
            length - query_len,
            int(batch.causal[r]),
            window_left,
            bool(batch.symmetric[r]),
            None if batch.spans is None else batch.spans[first_row:end_row, None],
        )
        rows.append(seen & (key_pos < length))
    return torch.cat(rows)


@pytest.mark.parametrize(("mix", "window_left", "block_size"), VISIBILITY)
def test_visibility(mix: str, window_left: int, block_size: int) -> None:
    D = 32
    batch = PagedBatch.random(
        MIXES[mix], num_heads=4, num_kv_heads=2, head_size=D, block_size=block_size
    )
    for first_key in range(0, int(batch.seq_lens.max()), D):
        probe = batch.probe(first_key).to(DEVICE)
        output = attention(**probe.arguments(), scale=1.0, window_left=window_left).cpu()
        expected = seen_by_definition(batch, window_left, first_key)
        assert torch.equal(output > 0, expected[:, None].expand_as(output))


@pytest.mark.parametrize(("num_splits", "block_size"), [(1, 64), (2, 16)])
def test_verified_blocks(
    triton_version: ModuleType, monkeypatch: pytest.MonkeyPatch, num_splits: int, block_size: int
) -> None:
    """Who sees whom, and numbers. No other request is served otherwise by this kernel."""
    monkeypatch.setattr(triton_version, "_choose_splits", lambda *_: num_splits)
    long = [Request(64, 544, causal=-32)] * (num_splits > 1)
    batch = small_batch([*VERIFIED, *long], block_size=block_size)
    for first_key in range(0, int(batch.seq_lens.max()), 32):
        probe = batch.probe(first_key).to(DEVICE)
        output = attention(**probe.arguments(), scale=1.0, verifies=True).cpu()
        expected = seen_by_definition(batch, -1, first_key)
        assert torch.equal(output > 0, expected[:, None].expand_as(output))
    output = attention(**batch.to(DEVICE).arguments(), scale=0.3, verifies=True).cpu()
    allowed(batch, scale=0.3).check(output)


@pytest.mark.parametrize(("mix", "window_left"), [("mixed", 15), ("images", 0)])
def test_the_kernel_of_verified_blocks_knows_windows_and_images(mix: str, window_left: int) -> None:
    batch = small_batch(MIXES[mix])
    options = {"scale": 0.3, "window_left": window_left}
    arguments = batch.to(DEVICE).arguments()
    expected = attention(**arguments, **options)
    assert torch.equal(attention(**arguments, **options, verifies=True), expected)


SHAPES = {  # requests, heads, key heads, head size, page
    "mixed": (MIXES["mixed"], 4, 2, 64, 16),
    "images": (MIXES["images"], 4, 2, 64, 16),
    "odd head size": (MIXES["mixed"], 2, 1, 48, 16),
    "three heads a group": (MIXES["mixed"], 6, 2, 32, 32),
    "one head a group": (MIXES["canvases"], 2, 2, 32, 64),
    "sliding layers of 26B": ([Request(16, 70), Request(9, 0, causal=True)], 4, 2, 256, 16),
    "full layers of 26B": ([Request(16, 70), Request(9, 0, causal=True)], 16, 2, 512, 32),
    "more heads a group than rows a tile": ([Request(3, 20), Request(2, 0, True)], 140, 1, 512, 16),
    "64 requests": ([Request(1 + r % 3, r, causal=r % 2 == 0) for r in range(64)], 2, 1, 32, 16),
    "long context": ([Request(4, 3000), Request(2, 2500, causal=True)], 2, 1, 32, 128),
}


def check_numbers(batch: PagedBatch, **options: Any) -> None:
    options = {"scale": 0.3, **options}
    output = attention(**batch.to(DEVICE).arguments(), **options).cpu()
    allowed(batch, **options).check(output)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "window_left"),
    [
        pytest.param(torch.float32, 11, id="fp32, window"),
        pytest.param(torch.float16, -1, id="fp16"),
        pytest.param(torch.float32, -1, id="fp32", marks=pytest.mark.slow),
        pytest.param(torch.float16, 11, id="fp16, window", marks=pytest.mark.slow),
    ],
)
def test_numbers(shape: str, dtype: torch.dtype, window_left: int) -> None:
    requests, num_heads, num_kv_heads, head_size, block_size = SHAPES[shape]
    batch = PagedBatch.random(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    check_numbers(batch, window_left=window_left, scale=head_size**-0.5)


def test_softcap() -> None:
    check_numbers(small_batch(), softcap=1.5, window_left=20)


@pytest.mark.parametrize(
    "num_splits",
    [2, pytest.param(3, marks=pytest.mark.thorough), pytest.param(7, marks=pytest.mark.thorough)],
)
def test_split_keys(
    triton_version: ModuleType, monkeypatch: pytest.MonkeyPatch, num_splits: int
) -> None:
    monkeypatch.setattr(triton_version, "_choose_splits", lambda *_: num_splits)
    requests = [*MIXES["mixed"], Request(4, 500), Request(3, 400, causal=True)]
    requests.append(Request(90, 400, causal=True, images=((405, 450),)))
    check_numbers(small_batch(requests))
    check_numbers(small_batch(requests), window_left=30)


@pytest.mark.parametrize("num_splits", [2, 4])
def test_how_many_shares_a_tile_makes_it_finds_out_on_the_device(
    triton_version: ModuleType, monkeypatch: pytest.MonkeyPatch, num_splits: int
) -> None:
    """With arrivals that never add up, what is joined stays unwritten: longer contexts alone."""
    least = triton_version.MIN_KEYS_PER_SPLIT
    requests = [
        Request(8, least - 8),  # one share
        Request(8, least),  # two
        Request(8, 6 * least),
        Request(8, 5, causal=True),
        Request(8, 2 * least, causal=True),
        Request(0, 700),
    ]
    joined = torch.tensor([False, True, True, False, True]).repeat_interleave(8)
    batch = small_batch(requests)
    arguments, right = batch.to(DEVICE).arguments(), allowed(batch, scale=0.3)
    monkeypatch.setattr(triton_version, "_choose_splits", lambda *_: num_splits)
    for _ in range(2):  # a launch leaves the arrivals as it found them
        right.check(attention(**arguments, scale=0.3).cpu())
    assert not triton_version._arrivals(arguments["query"].device).any()
    never = torch.full((1 << 16,), 1000, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(triton_version, "_arrivals", lambda _: never)
    output = attention(**arguments, scale=0.3).cpu()
    right.check(output, ~joined)
    assert not output[joined].any()


def test_a_capture_wants_a_run_before_it(
    triton_version: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must have run once before it is captured"):
        triton_version._arrivals.__wrapped__(torch.device("cuda"))


SLIDING, FULL = (16, 8, 256, 1023), (16, 2, 512, -1)  # heads, key heads, head size, window
SPLITS = {  # processors, layer, requests, context and queries of each, splits
    "one canvas, full": (132, FULL, 1, 8192, 256, 2),
    "one canvas, sliding": (132, SLIDING, 1, 8192, 256, 4),
    "one canvas, 108 processors": (108, FULL, 1, 8192, 256, 1),
    "one canvas, 148 processors": (148, FULL, 1, 65536, 256, 2),
    "two canvases": (132, FULL, 2, 8192, 256, 1),
    "eight canvases": (132, FULL, 8, 8192, 256, 1),
    "64 tokens of 64 requests": (132, FULL, 64, 8192, 1, 1),
    "short context": (132, FULL, 1, 0, 256, 2),
    "no GPU": (1, FULL, 1, 65536, 256, 1),
}
TOO_FEW_KEYS = {
    "a narrow canvas": (132, FULL, 1, 0, 64, 1),
    "three shares": (132, FULL, 1, 320, 64, 2),
    "one token": (132, FULL, 1, 65536, 1, 16),
}


@pytest.mark.parametrize("case", SPLITS | TOO_FEW_KEYS)
def test_few_requests_fill_the_processors(
    triton_version: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    num_processors, layer, num_reqs, context_len, query_len, expected = (SPLITS | TOO_FEW_KEYS)[
        case
    ]
    num_heads, num_kv_heads, head_size, window_left = layer
    launches: list[tuple[tuple[int, ...], dict[str, int]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launches.append((grid, options))

    monkeypatch.setattr(triton_version, "_attention_kernel", Kernel())
    monkeypatch.setattr(triton_version, "_num_processors", lambda _: num_processors)
    shape = (num_reqs * query_len, num_heads, head_size)
    query = torch.empty(shape, dtype=torch.half)
    cache = torch.empty(1, 16, num_kv_heads, head_size, dtype=torch.half)
    integers = torch.zeros(num_reqs + 1, dtype=torch.int32)
    each = integers[:num_reqs]
    triton_version.attention(
        Batch(query, cache, cache, each[:, None], integers, each, each, symmetric=each),
        output=query,
        scale=1.0,
        window_left=window_left,
        softcap=0.0,
        key_scale=None,
        value_scale=None,
        max_seq_len=context_len + query_len,
    )
    (((_, num_parts, num_splits), options),) = launches
    assert num_splits == expected
    tiles_with_queries = num_reqs * triton.cdiv(query_len, options["BLOCK_Q"])
    programs = tiles_with_queries * num_parts * num_splits
    assert (2 * programs > num_processors) == (case in SPLITS)
    assert num_splits == 1 or programs <= num_processors, "some wait for others"


def test_fp8_cache_with_scales() -> None:
    batch = small_batch(dtype=torch.float16)
    # The error budget starts from the numbers the cache holds, so they must be fp8 numbers.
    coarse = replace(
        batch, key_cache=batch.key_cache.to(FP8), value_cache=batch.value_cache.to(FP8)
    )
    scales = {"key_scale": torch.tensor([0.5]), "value_scale": torch.tensor([3.0])}
    output = attention(
        **coarse.to(DEVICE).arguments(),
        scale=0.3,
        **{name: scale.to(DEVICE) for name, scale in scales.items()},
    ).cpu()
    allowed(coarse, scale=0.3, **scales).check(output)


def test_bf16_is_refused_in_the_interpreter(triton_version: ModuleType) -> None:
    """It multiplies bf16 wrongly, by many orders of magnitude."""
    batch = small_batch(dtype=torch.bfloat16).to(DEVICE)
    if isinstance(triton_version._attention_kernel, triton.JITFunction):
        allowed(batch, scale=0.3).check(attention(**batch.arguments(), scale=0.3))
        return
    with pytest.raises(ValueError, match="takes float16 and float32 in Triton's interpreter"):
        attention(**batch.arguments(), scale=0.3)


def test_compiled_kernels_want_a_gpu(
    triton_version: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = triton.JITFunction(triton_version._attention_kernel.fn)
    monkeypatch.setattr(triton_version, "_attention_kernel", compiled)
    with pytest.raises(ValueError, match=r"on a GPU, got query on cpu: .*impl='reference'"):
        attention(**small_batch().arguments(), scale=0.3)


@settings(deadline=None, max_examples=300)
@given(
    query_len=st.integers(1, 70),
    context_len=st.integers(0, 200),
    first=st.integers(0, 69),
    block_q=st.sampled_from([1, 8, 16]),
    causal=st.sampled_from([0, 1, 4, 32, -4, -32]),
    symmetric=st.booleans(),
    window_left=st.integers(-1, 90),
    verifies=st.booleans(),
)
def test_visits_all_keys_that_are_seen_and_no_tile_without_one(
    query_len: int,
    context_len: int,
    first: int,
    block_q: int,
    causal: int,
    symmetric: bool,
    window_left: int,
    verifies: bool,  # whether any request may
) -> None:
    """A request that verifies has no window, and does not see all keys in between."""
    if causal < 0:
        window_left, verifies = -1, True
    first = min(first, query_len - 1)
    last = min(first + block_q, query_len) - 1
    seq_len = context_len + query_len
    arguments = (context_len + first, context_len + last, context_len, seq_len)
    start, end = key_range.fn(*arguments, causal, symmetric, window_left, verifies)
    query_pos = torch.arange(arguments[0], arguments[1] + 1)[:, None]
    seen = visible(
        query_pos, torch.arange(seq_len), context_len, causal, window_left, symmetric
    ).any(dim=0)
    assert seen[start:end].all() or (causal < 0 and seen[end - 1])
    assert not seen[:start].any() and not seen[end:].any()
    by_definition = visible_range(*map(torch.tensor, arguments), causal, window_left, symmetric)
    assert [int(bound) for bound in by_definition] == [start, end]


def test_says_which_head_sizes_it_does() -> None:
    with pytest.raises(ValueError, match=r"head sizes from 16 to 512, got query with 8"):
        attention(**small_batch(head_size=8).to(DEVICE).arguments(), scale=1.0)
