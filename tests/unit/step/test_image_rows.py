"""Which rows of a step belong to which image."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from vllm_dllm.step.runner.attn_requests import ImageRows

BEGIN, NUM = 1, 4  # marks before an image's tokens; its tokens


def feature(offset: int) -> SimpleNamespace:
    is_embed = torch.tensor([False] * BEGIN + [True] * NUM + [False])
    return SimpleNamespace(mm_position=PlaceholderRange(offset, len(is_embed), is_embed))


def batch(slots: list[int], computed: list[int], scheduled: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        num_reqs=len(slots),
        num_tokens=sum(scheduled),
        idx_mapping_np=np.array(slots),
        num_computed_tokens_np=np.array(computed),
        num_scheduled_tokens=np.array(scheduled),
        query_start_loc_np=np.cumsum([0, *scheduled]),
    )


@pytest.fixture
def rows() -> ImageRows:
    """Slot 2 has images at 3..7 and 9..13, slot 5 one at 1..5, the others none."""
    rows = ImageRows(max_num_reqs=8, max_num_tokens=64, device=torch.device("cpu"))
    rows.add_request(2, [feature(2), feature(8)])
    rows.add_request(5, [feature(0)])
    rows.add_request(3, [])
    return rows


def test_rows_of_a_mixed_batch(rows: ImageRows) -> None:
    spans = rows.spans(batch([3, 2, 0, 5], [0, 2, 10, 0], [3, 9, 4, 7]))
    assert spans is not None
    text = (0, 0)
    expected = [text] * 3  # slot 3
    # Slot 2, from position 2 on: mark, image, two marks, the first tokens of the next image.
    expected += [text, *[(3, 7)] * 4, text, text, *[(9, 13)] * 2]
    expected += [text] * 4  # slot 0
    expected += [text, *[(1, 5)] * 4, text, text]  # slot 5
    assert spans.tolist() == [list(span) for span in expected]
    assert spans.dtype == torch.int32


def test_a_part_that_begins_inside_an_image_has_its_whole_span(rows: ImageRows) -> None:
    spans = rows.spans(batch([2], [5], [3]))
    assert spans is not None and spans.tolist() == [[3, 7], [3, 7], [0, 0]]


@pytest.mark.parametrize(
    ("slots", "computed", "scheduled"),
    [([0, 3], [0, 5], [4, 8]), ([2], [13], [8]), ([2], [0], [3]), ([5], [5], [2])],
    ids=["no images", "past them", "before them", "behind its only one"],
)
def test_none_without_rows_of_images(
    rows: ImageRows, slots: list[int], computed: list[int], scheduled: list[int]
) -> None:
    assert rows.spans(batch(slots, computed, scheduled)) is None


def test_the_buffer_stays(rows: ImageRows) -> None:
    one = rows.spans(batch([2], [0], [8]))
    other = rows.spans(batch([5], [0], [6]))
    assert one is not None and other is not None and one.data_ptr() == other.data_ptr()


def test_a_slot_forgets_its_request(rows: ImageRows) -> None:
    rows.add_request(2, [])
    rows.remove_request(5)
    assert rows.spans(batch([2, 5], [0, 0], [8, 8])) is None
