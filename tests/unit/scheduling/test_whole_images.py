"""Where parts of prompts with images end."""

from types import SimpleNamespace

import pytest

from vllm_dllm.scheduling.whole_images import before_image

IMAGES = [SimpleNamespace(mm_position=SimpleNamespace(offset=o, length=6)) for o in (2, 8, 20)]


@pytest.mark.parametrize(
    ("end", "found"),
    [(0, 0), (2, 2), (3, 2), (7, 2), (8, 8), (9, 8), (14, 14), (19, 19), (25, 20), (26, 26)],
)
def test_never_inside_an_image(end: int, found: int) -> None:
    assert before_image(IMAGES, end) == found


def test_texts_end_anywhere() -> None:
    assert before_image([], 7) == 7
