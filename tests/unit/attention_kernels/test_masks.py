"""Visibility: the rules written out by hand; what is allowed for rounding is less than any mistake
makes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention_kernels.masks import block_spans, verifying_spans, visible
from attention_kernels.testing import PagedBatch, Request, allowed


def rows(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def grid(context: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = context + queries
    return torch.arange(context, length)[:, None], torch.arange(length)[None, :]


def test_rules_by_hand() -> None:
    query_pos, key_pos = grid(context=4, queries=3)

    def drawn(causal: int, window_left: int, symmetric: bool = False) -> list[str]:
        return rows(visible(query_pos, key_pos, 4, causal, window_left, symmetric))

    assert drawn(causal=True, window_left=-1) == ["xxxxx..", "xxxxxx.", "xxxxxxx"]
    assert drawn(causal=3, window_left=-1) == ["xxxxxx.", "xxxxxx.", "xxxxxxx"]  # cut at its end
    assert drawn(causal=4, window_left=-1) == ["xxxxxxx"] * 3
    assert drawn(causal=3, window_left=2) == ["..xxxx.", "...xxx.", "....xxx"]
    assert drawn(causal=False, window_left=-1) == ["xxxxxxx"] * 3
    assert drawn(causal=True, window_left=2) == ["..xxx..", "...xxx.", "....xxx"]
    assert drawn(causal=False, window_left=2) == ["..xxxxx"] * 3
    assert drawn(causal=False, window_left=2, symmetric=True) == ["..xxxxx", "...xxxx", "....xxx"]
    assert drawn(causal=False, window_left=1, symmetric=True) == ["...xxx.", "....xxx", ".....xx"]
    assert drawn(causal=False, window_left=0) == ["....xxx"] * 3
    assert drawn(causal=True, window_left=0) == ["....x..", ".....x.", "......x"]


@pytest.mark.parametrize("block", [1, 4, 7, 32])
def test_blocks_are_images_of_causal_requests(block: int) -> None:
    """How FlashAttention-4 is told of blocks."""
    query_pos, key_pos = grid(context=5, queries=60)
    spans = block_spans(query_pos[:, 0], block)[:, None]
    by_blocks = visible(query_pos, key_pos, 5, block, window_left=-1)
    assert torch.equal(visible(query_pos, key_pos, 5, 1, window_left=-1, spans=spans), by_blocks)


def test_verified_blocks_by_hand() -> None:
    """A block of three, of which the cache holds the first token, and its copy."""
    query_pos, key_pos = grid(context=4, queries=5)
    seen = visible(query_pos, key_pos, 4, causal=-3, window_left=-1)
    assert rows(seen) == ["xxxxx....", "xxxxxx...", "xxx...x..", "xxxx...x.", "xxxxx...x"]


@pytest.mark.parametrize("block", [1, 4, 7, 32])
def test_verified_blocks_are_images_of_rows_that_see_themselves(block: int) -> None:
    """How FlashAttention-4 is told of them."""
    query_pos, key_pos = grid(context=5, queries=60)
    spans = verifying_spans(query_pos[:, 0], torch.tensor(5), block)[:, None]
    own = visible(query_pos, key_pos, 5, True, window_left=0, spans=spans)
    assert torch.equal(own, visible(query_pos, key_pos, 5, -block, window_left=-1))


def test_images_by_hand() -> None:
    """One of the keys 3 to 5, whose rows see each other and, as all rows do, what came before."""
    query_pos, key_pos = grid(context=2, queries=6)
    spans = torch.zeros(6, 1, 2, dtype=torch.int32)
    spans[1:4] = torch.tensor((3, 6))

    def drawn(causal: int, window_left: int, symmetric: bool = False) -> list[str]:
        return rows(visible(query_pos, key_pos, 2, causal, window_left, symmetric, spans))

    assert drawn(causal=True, window_left=-1) == [
        "xxx.....",
        "xxxxxx..",
        "xxxxxx..",
        "xxxxxx..",
        "xxxxxxx.",
        "xxxxxxxx",
    ]
    # The window ends at the third key back, and not at the second of an image.
    assert drawn(causal=True, window_left=1) == [
        ".xx.....",
        "..xxxx..",
        "...xxx..",
        "...xxx..",
        ".....xx.",
        "......xx",
    ]
    assert drawn(causal=True, window_left=0)[1:4] == ["...xxx.."] * 3
    assert drawn(causal=False, window_left=0, symmetric=True)[1:4] == ["...xxx.."] * 3
    assert drawn(causal=False, window_left=0) == ["..xxxxxx"] * 6


def test_two_images_side_by_side_are_two() -> None:
    query_pos, key_pos = grid(context=0, queries=4)
    spans = torch.tensor(((0, 2), (0, 2), (2, 4), (2, 4)))[:, None]
    seen = visible(query_pos, key_pos, 0, causal=True, window_left=-1, spans=spans)
    assert rows(seen) == ["xx..", "xx..", "xxxx", "xxxx"]


def test_per_request_flags_broadcast() -> None:
    query_pos, key_pos = grid(context=5, queries=4)
    causal = torch.tensor([1, 0, 0, 3])[:, None, None]
    symmetric = torch.tensor([0, 0, 1, 0]).bool()[:, None, None]
    together = visible(query_pos, key_pos, 5, causal, 2, symmetric)
    for i in range(4):
        alone = visible(query_pos, key_pos, 5, int(causal[i]), 2, bool(symmetric[i]))
        assert torch.equal(together[i], alone)


WINDOW, SCALE = 40, 0.2
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Mistake = Callable[[PagedBatch], torch.Tensor]


def attended(batch: PagedBatch, window_left: int = WINDOW, scale: float = SCALE) -> torch.Tensor:
    return batch.reference(torch.float64, scale=scale, window_left=window_left)


def with_a_wrong_element(batch: PagedBatch) -> torch.Tensor:
    output = attended(batch)
    largest = output.abs().argmax()
    output.view(-1)[largest] *= 1.02
    return output


def with_one_page_of_another_request(batch: PagedBatch) -> torch.Tensor:
    block_table = batch.block_table.clone()
    block_table[0, 3] = block_table[1, 3]
    return attended(replace(batch, block_table=block_table))


MISTAKES: dict[str, Mistake] = {
    "a key more": lambda batch: attended(batch, window_left=WINDOW + 1),
    "a key less": lambda batch: attended(batch, window_left=WINDOW - 1),
    "a scale off by 1%": lambda batch: attended(batch, scale=1.01 * SCALE),
    "the other window rule": lambda batch: attended(
        replace(batch, symmetric=torch.ones_like(batch.symmetric))
    ),
    "one element off by 2%": with_a_wrong_element,
    "one page of another request": with_one_page_of_another_request,
    "a row not written": lambda batch: attended(batch).index_fill(0, torch.tensor([3]), torch.nan),
}


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def batch(request: pytest.FixtureRequest) -> PagedBatch:
    return PagedBatch.random(
        [Request(16, 70), Request(9, 60)],
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        block_size=16,
        dtype=request.param,
    )


@pytest.mark.numerics
def test_rounding_is_allowed(batch: PagedBatch) -> None:
    """Of the scores, the weights and the output; 16 bits hold no scores."""
    right = allowed(batch, scale=SCALE, window_left=WINDOW)
    right.check(attended(batch).to(batch.query.dtype))
    right.check(batch.reference(torch.float32, scale=SCALE, window_left=WINDOW))


@pytest.mark.numerics
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_not(batch: PagedBatch, mistake: str) -> None:
    right = allowed(batch, scale=SCALE, window_left=WINDOW)
    with pytest.raises(AssertionError):
        right.check(MISTAKES[mistake](batch))
