"""The Triton version and how its arguments lie in memory: strides and gaps, addresses far apart, no
rows at all, rows of no request, and pages that it must not look at."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attention_kernels.api import FP8, attention
from attention_kernels.testing import Request, allowed, with_gaps
from tests.unit.attention_kernels.batches import MIXES, small_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("triton_version")]


def test_strided_arguments() -> None:
    """As an engine has them: keys and values side by side, queries a part of a wider row."""
    batch = small_batch(head_size=32)
    both = torch.stack((batch.key_cache, batch.value_cache), dim=1).to(DEVICE)
    wide = torch.cat((batch.query, batch.query + 1), dim=1).to(DEVICE)
    output = torch.full_like(wide, torch.nan)
    arguments = batch.to(DEVICE).arguments() | {
        "query": wide[:, : batch.query.shape[1]],
        "key_cache": both[:, 0],
        "value_cache": both[:, 1],
    }
    attention(**arguments, scale=0.3, output=output[:, : batch.query.shape[1]])
    assert output[:, batch.query.shape[1] :].isnan().all(), "written outside of its rows"
    allowed(batch, scale=0.3).check(output[:, : batch.query.shape[1]].cpu())


GAPPED = ["query", "key_cache", "value_cache", "block_table", "query_start_loc", "seq_lens"]
GAPPED += ["causal", "window_rule", "spans", "output"]


@pytest.mark.parametrize("name", GAPPED)
def test_gaps_along_a_last_dimension_are_refused(name: str) -> None:
    arguments = small_batch(MIXES["images"]).to(DEVICE).arguments()
    arguments["output"] = torch.zeros_like(arguments["query"])
    arguments[name] = with_gaps(arguments[name])
    said = "contiguous spans" if name == "spans" else f"a {name} that is contiguous .*"
    with pytest.raises(ValueError, match=f"{said}, got strides .*"):
        attention(**arguments, scale=0.3)
    assert not arguments["output"].any(), "written all the same"


def test_one_request_may_be_a_slice_with_gaps() -> None:
    """The stride of a dimension of one is nobody's concern."""
    batch = small_batch([Request(8, 5)])
    arguments = batch.to(DEVICE).arguments()
    for name in ("block_table", "seq_lens", "causal", "window_rule"):
        arguments[name] = with_gaps(arguments[name])
    allowed(batch, scale=0.3).check(attention(**arguments, scale=0.3).cpu())


def test_no_queries_and_no_requests() -> None:
    arguments = small_batch().to(DEVICE).arguments()
    empty = {**arguments, "query": arguments["query"][:0]}
    assert attention(**empty, scale=0.3).shape == (0, 4, 32)
    for name in ("block_table", "seq_lens", "causal", "window_rule"):
        arguments[name] = arguments[name][:0]
    arguments["query_start_loc"] = arguments["query_start_loc"][:1]
    assert not attention(**arguments, scale=0.3).any()


def far_apart(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """The same numbers, `stride` elements from one to the next along `dim` and the others in
    between. What lies in between is never touched, so it takes addresses and no memory."""
    order = [dim, *(d for d in range(tensor.dim()) if d != dim)]
    inner = tensor.permute(order)[0].contiguous()
    size = (tensor.shape[dim] - 1) * stride + inner.numel()
    far = torch.empty(size, dtype=tensor.dtype, device=tensor.device).as_strided(
        (tensor.shape[dim], *inner.shape), (stride, *inner.stride())
    )
    far = far.permute([order.index(d) for d in range(tensor.dim())])
    return far.copy_(tensor)


FAR = {  # argument, dimension
    "query heads": ("query", 1),
    "output heads": ("output", 1),
    "key heads": ("key_cache", 2),
    "value heads": ("value_cache", 2),
    "key slots": ("key_cache", 1),
    "value slots": ("value_cache", 1),
}


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("case", FAR)
def test_addresses_past_2_to_the_31(
    triton_version: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str, num_splits: int
) -> None:
    """Of elements, in up to 4 GiB of addresses."""
    monkeypatch.setattr(triton_version, "_choose_splits", lambda *_: num_splits)
    name, dim = FAR[case]
    batch = small_batch(
        [Request(3, 20), Request(2, 5, causal=True)], num_heads=3, num_kv_heads=3, dtype=torch.half
    )
    batch = replace(batch, key_cache=batch.key_cache.to(FP8), value_cache=batch.value_cache.to(FP8))
    arguments = batch.to(DEVICE).arguments()
    arguments["output"] = torch.zeros_like(arguments["query"])
    last = arguments[name].shape[dim] - 1  # the stride alone fits 32 bits, their product does not
    arguments[name] = far_apart(arguments[name], dim, 2**31 // last + 64)
    output = attention(**arguments, scale=0.3).cpu()
    allowed(batch, scale=0.3).check(output)


def test_rows_of_no_request_are_left_alone() -> None:
    """A captured CUDA graph has more rows than the requests it is replayed with."""
    batch = small_batch()
    padding = torch.full((7, *batch.query.shape[1:]), torch.nan)
    padded = replace(batch, query=torch.cat((batch.query, padding)))
    output = attention(**padded.to(DEVICE).arguments(), scale=0.3).cpu()
    assert (output[len(batch.query) :] == 0).all()
    allowed(batch, scale=0.3).check(output[: len(batch.query)])


@pytest.mark.parametrize("block_size", [16, 128])
def test_pages_before_the_window_may_hold_anything(block_size: int) -> None:
    """An engine gives them to other requests."""
    window_left = 20
    batch = small_batch(
        [
            *(Request(8, 300), Request(5, 200, True), Request(3, 77, symmetric=True)),
            Request(90, 300, causal=True, images=((300, 380),)),  # longer than the window
        ],
        block_size=block_size,
    )
    options = {"scale": 0.3, "window_left": window_left}
    right = allowed(batch, **options)
    for r, length in enumerate(batch.seq_lens.tolist()):
        query_len = int(batch.query_start_loc[r + 1] - batch.query_start_loc[r])
        position = torch.arange(length - query_len - window_left)
        pages = batch.block_table[r, position // block_size].long()
        for cache in (batch.key_cache, batch.value_cache):
            cache[pages, position % block_size] = torch.nan
    right.check(attention(**batch.to(DEVICE).arguments(), **options).cpu())
