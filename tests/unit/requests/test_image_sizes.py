"""Images that are not scaled: sizes that become whole tokens, and not too many of them."""

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_dllm.requests.media import check_image_size


@pytest.mark.parametrize("size", [(8, 8), (24, 24), (48, 16), (560, 8)])
def test_taken(size: tuple[int, int]) -> None:
    check_image_size(*size, unit=8, max_tokens=70)


@pytest.mark.parametrize("size", [(8, 7), (1, 8), (568, 8), (72, 64)])
def test_refused(size: tuple[int, int]) -> None:
    with pytest.raises(VLLMValidationError, match=f"got {size[0]} x {size[1]}"):
        check_image_size(*size, unit=8, max_tokens=70)
