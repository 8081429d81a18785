"""Where an image or a video may come from, and what comes as an image: pictures are read,
everything else is refused in words, undecoded. Both ways of a server give the same."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from tests.pictures import data_url, encoded, grey_frames, png_header, write_video
from vllm_dllm.requests import media
from vllm_dllm.requests.media import check_image_size
from vllm_dllm.requests.media_bytes import (
    CONNECTOR,
    MAX_PIXELS,
    CarefulImageIO,
    CarefulVideoIO,
)

PICTURE = Image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3))


def read(kind: str, url: str, **options: Any) -> Any:
    """An image; or a video's frames and metadata."""
    connector = MEDIA_CONNECTOR_REGISTRY.load(CONNECTOR, **options)
    later = getattr(connector, f"fetch_{kind}_async")
    found: list[Any] = []
    for fetch in (getattr(connector, f"fetch_{kind}"), lambda url: asyncio.run(later(url))):
        try:
            found.append(fetch(url).media)
        except VLLMValidationError as error:
            found.append(error)
    one, other = found
    if isinstance(one, VLLMValidationError):
        assert isinstance(other, VLLMValidationError)
        assert str(one).partition(":")[0] == str(other).partition(":")[0]
        raise one
    pixels, others = ((it, None) if kind == "image" else it for it in found)
    assert (np.asarray(pixels[0]) == np.asarray(others[0])).all() and pixels[1] == others[1]
    return one


def refusal(kind: str, url: str, **options: Any) -> str:
    with pytest.raises(VLLMValidationError) as error:
        read(kind, url, **options)
    assert "object at 0x" not in str(error.value)
    return str(error.value)


kinds = pytest.mark.parametrize("kind", ["image", "video"])


@kinds
@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("https://example.com/a", "--allowed-media-domains"),
        ("HTTP://127.0.0.1/a", "--allowed-media-domains"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("ftp://example.com/a", "must begin with data:"),
        ("nonsense", "must begin with data:"),
        ("data:{kind}/png,abc", "must be in base64"),
        ("data:{kind}/png;base64", "cannot be used"),
        ("data:{kind}/png;base64,***", "cannot be used"),
        ("data:text/plain;base64,YQ==", "media type must begin with {kind}/"),
    ],
)
def test_an_address_that_is_refused(kind: str, url: str, complaint: str) -> None:
    assert complaint.format(kind=kind) in refusal(kind, url.format(kind=kind))


@kinds
def test_an_address_that_is_no_text(kind: str) -> None:
    """vLLM looks at no types in a part with a `uuid`."""
    wrong: Any
    for wrong in (5, ["a"], True):
        assert f"URL must be a text, got {wrong}" in refusal(kind, wrong)


@kinds
def test_files_below_the_allowed_folder(tmp_path: Path, kind: str) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    for folder in (allowed, tmp_path):
        if kind == "image":
            PICTURE.save(folder / "it.png")
        else:
            write_video(folder / "a.mp4", grey_frames(3))
            (folder / "a.mp4").rename(folder / "it.png")
    options = {"allowed_local_media_path": str(allowed)}
    assert read(kind, f"file://{allowed}/it.png", **options)
    for path in (f"{tmp_path}/it.png", f"{allowed}/../it.png"):
        assert "must be a subpath" in refusal(kind, f"file://{path}", **options)
    assert "must exist" in refusal(kind, f"file://{allowed}/missing.png", **options)


@kinds
def test_large_bytes_are_not_opened(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert media.MAX_BYTES > 1000
    monkeypatch.setattr(media, "MAX_BYTES", 1000)
    said = refusal(kind, data_url(bytes(1001), f"{kind}/png"))
    assert "at most 1000 bytes, got 1001" in said


@kinds
def test_hosts_that_are_not_named_are_not_fetched_from(kind: str) -> None:
    domains = {"allowed_media_domains": ["pictures.example"]}
    assert "allowed domains" in refusal(kind, "https://other.example/a.png", **domains)


@pytest.mark.slow
def test_an_address_that_cannot_be_reached() -> None:
    domains = {"allowed_media_domains": ["127.0.0.1"]}
    assert "cannot be fetched" in refusal("image", "http://127.0.0.1:1/a.png", **domains)


NOISE = Image.effect_noise((64, 64), 100)
SEVERAL = {"save_all": True, "append_images": [PICTURE.rotate(180)]}
REFUSED_IMAGES: dict[str, tuple[bytes, str]] = {
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


@pytest.mark.parametrize("name", REFUSED_IMAGES)
def test_an_image_that_is_refused(name: str) -> None:
    data, complaint = REFUSED_IMAGES[name]
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


@pytest.mark.parametrize(
    ("size", "fits"),
    [
        *[(size, True) for size in ((8, 8), (24, 24), (48, 16), (560, 8))],
        *[(size, False) for size in ((8, 7), (1, 8), (568, 8), (72, 64))],
    ],
)
def test_sizes_that_become_whole_tokens_where_nothing_is_scaled(
    size: tuple[int, int], fits: bool
) -> None:
    complaint = f"got {size[0]} x {size[1]}"
    with nullcontext() if fits else pytest.raises(VLLMValidationError, match=complaint):
        check_image_size(*size, unit=8, max_tokens=70)


def test_a_request_s_budget_of_decoded_bytes_is_kept() -> None:
    """vLLM's readers have had it since 0.33, where decoding charges it."""
    budget = object()
    image_io = SimpleNamespace(image_mode="RGB", kwargs={}, decoded_budget=budget)
    loader = SimpleNamespace(image_io=image_io, num_frames=2, kwargs={}, video_loader=None)
    assert CarefulImageIO.with_options_of(image_io).decoded_budget is budget
    assert CarefulVideoIO.with_options_of(loader).image_io.decoded_budget is budget
