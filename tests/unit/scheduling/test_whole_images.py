"""Where parts of prompts with images and videos end."""

from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from vllm_dllm.scheduling.prompts import end_before_image


def feature(offset: int, is_embed: list[bool]) -> SimpleNamespace:
    mask = torch.tensor(is_embed)
    return SimpleNamespace(mm_position=PlaceholderRange(offset, len(mask), mask))


MARKED = [False, *[True] * 4, False]  # an image or a frame, between its marks
IMAGES = [feature(offset, MARKED) for offset in (2, 8, 20)]
VIDEO = [feature(3, [False, *MARKED, False, False, *MARKED])]  # each frame behind its time


@pytest.mark.parametrize(
    ("end", "found"),
    [(0, 0), (2, 2), (3, 2), (7, 2), (8, 8), (9, 8), (14, 14), (19, 19), (25, 20), (26, 26)],
)
def test_never_inside_an_image(end: int, found: int) -> None:
    assert end_before_image(IMAGES, end) == found


@pytest.mark.parametrize(
    ("end", "found"),
    [(3, 3), (4, 4), (5, 4), (9, 4), (10, 10), (11, 11), (12, 12), (13, 12), (17, 12), (18, 18)],
)
def test_between_the_frames_of_a_video(end: int, found: int) -> None:
    assert end_before_image(VIDEO, end) == found


def test_texts_end_anywhere() -> None:
    assert end_before_image([], 7) == 7
