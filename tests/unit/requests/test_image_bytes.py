"""What comes as an image: pictures are read, everything else is refused in words, undecoded."""

import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError

from tests.pictures import data_url, encoded, png_header
from tests.unit.requests.test_media_url import PICTURE, read, refusal
from vllm_dllm.requests.media import check_image_size
from vllm_dllm.requests.media_bytes import MAX_PIXELS

NOISE = Image.effect_noise((64, 64), 100)
SEVERAL = {"save_all": True, "append_images": [PICTURE.rotate(180)]}
REFUSED: dict[str, tuple[bytes, str]] = {
    "truncated": (encoded(NOISE)[:2000], "cannot be read"),
    "header only": (encoded(PICTURE)[:30], "cannot be read"),
    "empty": (b"", "format is not known"),
    "svg": (b"<svg/>", "format is not known"),
    "a bomb": (png_header(20_000, 20_000), f"at most {MAX_PIXELS}"),
    "more than is decoded": (png_header(8_000, 8_000), "got 8000 x 8000"),
    "no pixels": (png_header(0, 5), "cannot be read"),
    "animated GIF": (encoded(PICTURE, "GIF", **SEVERAL), "several frames"),
    "animated PNG": (encoded(PICTURE, "PNG", **SEVERAL), "several frames"),
    "pages": (encoded(PICTURE, "TIFF", **SEVERAL), "several"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    data, complaint = REFUSED[name]
    assert complaint in refusal("image", data_url(data))


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP", "TIFF"])
def test_pictures_are_read_pixel_by_pixel(form: str) -> None:
    url = data_url(encoded(PICTURE, form, **({"lossless": True} if form == "WEBP" else {})))
    assert (np.asarray(read("image", url)) == np.asarray(PICTURE)).all()


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA", "RGBA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (7, 5)])
def test_other_modes_become_rgb(mode: str, size: tuple[int, int]) -> None:
    form = "TIFF" if mode == "CMYK" else "PNG"
    image = Image.new("I;16", size) if mode == "I;16" else PICTURE.resize(size).convert(mode)
    found = read("image", data_url(encoded(image, form)))
    assert (found.size, found.mode) == (size, "RGB")


def test_a_photograph_of_several_sizes_is_one_picture() -> None:
    """Telephones write such JPEGs."""
    data = encoded(PICTURE, "MPO", **SEVERAL)
    assert read("image", data_url(data, "image/jpeg")).size == PICTURE.size


@pytest.mark.parametrize("size", [(8, 8), (24, 24), (48, 16), (560, 8)])
def test_sizes_that_become_whole_tokens_where_nothing_is_scaled(size: tuple[int, int]) -> None:
    check_image_size(*size, unit=8, max_tokens=70)


@pytest.mark.parametrize("size", [(8, 7), (1, 8), (568, 8), (72, 64)])
def test_other_sizes_and_too_many_tokens(size: tuple[int, int]) -> None:
    with pytest.raises(VLLMValidationError, match=f"got {size[0]} x {size[1]}"):
        check_image_size(*size, unit=8, max_tokens=70)
