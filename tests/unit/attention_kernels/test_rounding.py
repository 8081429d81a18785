"""What is allowed for rounding is less than any mistake makes, in every dtype."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention_kernels.testing import PagedBatch, Request, allowed

pytestmark = pytest.mark.numerics

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


def test_rounding_is_allowed(batch: PagedBatch) -> None:
    """Of the scores, the weights and the output; 16 bits hold no scores."""
    right = allowed(batch, scale=SCALE, window_left=WINDOW)
    right.check(attended(batch).to(batch.query.dtype))
    right.check(batch.reference(torch.float32, scale=SCALE, window_left=WINDOW))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_not(batch: PagedBatch, mistake: str) -> None:
    right = allowed(batch, scale=SCALE, window_left=WINDOW)
    with pytest.raises(AssertionError):
        right.check(MISTAKES[mistake](batch))
