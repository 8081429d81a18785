"""What comes as an image: pictures are read, everything else is refused in words, undecoded."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from tests.pictures import data_url, encoded, png_header
from vllm_dllm.requests import media
from vllm_dllm.requests.media import MAX_BYTES
from vllm_dllm.requests.media_bytes import MAX_PIXELS
from vllm_dllm.requests.media_url import CONNECTOR

PICTURE = Image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3))

NOISE = Image.effect_noise((64, 64), 100)


def read(url: str, **options: Any) -> Image.Image:
    """Both ways of a server give the same image, or the same refusal."""
    connector = MEDIA_CONNECTOR_REGISTRY.load(CONNECTOR, **options)
    found = []
    for fetch in (connector.fetch_image, lambda url: asyncio.run(connector.fetch_image_async(url))):
        try:
            found.append(np.asarray(fetch(url)))
        except VLLMValidationError as error:
            found.append(error)
    one, other = found
    if isinstance(one, VLLMValidationError):
        assert isinstance(other, VLLMValidationError)
        assert str(one).partition(":")[0] == str(other).partition(":")[0]
        raise one
    assert (one == other).all()
    return Image.fromarray(one)


FRAMES = [PICTURE, PICTURE.rotate(180)]
SEVERAL = {"save_all": True, "append_images": FRAMES[1:]}


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        pytest.param(data_url(encoded(NOISE)[:2000]), "cannot be read", id="truncated"),
        pytest.param(data_url(encoded(PICTURE)[:30]), "cannot be read", id="header only"),
        pytest.param(data_url(b""), "format is not known", id="empty"),
        pytest.param(data_url(b"<svg/>", "image/svg+xml"), "format is not known", id="svg"),
        pytest.param(data_url(b"text", "text/plain"), "media type must begin", id="wrong MIME"),
        pytest.param(data_url(encoded(PICTURE), "text/plain"), "media type", id="MIME of a text"),
        pytest.param(data_url(png_header(20_000, 20_000)), f"at most {MAX_PIXELS}", id="a bomb"),
        pytest.param(
            data_url(png_header(8_000, 8_000)), "got 8000 x 8000", id="more than is decoded"
        ),
        pytest.param(data_url(png_header(0, 5)), "cannot be read", id="no pixels"),
        pytest.param(
            data_url(encoded(PICTURE, "GIF", **SEVERAL)), "several frames", id="animated GIF"
        ),
        pytest.param(
            data_url(encoded(PICTURE, "PNG", **SEVERAL)), "several frames", id="animated PNG"
        ),
        pytest.param(data_url(encoded(PICTURE, "TIFF", **SEVERAL)), "several", id="pages"),
        pytest.param("data:image/png,abc", "must be in base64", id="not base64"),
        pytest.param("data:image/png;base64", "must be in base64|cannot be used", id="no data"),
        pytest.param("data:image/png;base64,***", "cannot be used", id="not even base64"),
        pytest.param("https://example.com/a.png", "--allowed-media-domains", id="web"),
        pytest.param("HTTP://127.0.0.1/a.png", "--allowed-media-domains", id="own network"),
        pytest.param("file:///etc/passwd", "--allowed-local-media-path", id="file"),
        pytest.param("ftp://example.com/a.png", "must begin with data:", id="ftp"),
        pytest.param("nonsense", "must begin with data:", id="nonsense"),
    ],
)
def test_refused(url: str, complaint: str) -> None:
    with pytest.raises(VLLMValidationError, match=complaint) as error:
        read(url)
    assert "object at 0x" not in str(error.value)


def test_large_bytes_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_BYTES", 1000)
    with pytest.raises(VLLMValidationError, match="at most 1000 bytes, got 1001"):
        read(data_url(bytes(1001)))
    assert MAX_BYTES > 1000


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encoded(PICTURE), id="PNG"),
        pytest.param(encoded(PICTURE, "BMP"), id="BMP"),
        pytest.param(encoded(PICTURE, "WEBP", lossless=True), id="WebP"),
        pytest.param(encoded(PICTURE, "TIFF"), id="one page"),
    ],
)
def test_pictures_are_read_pixel_by_pixel(data: bytes) -> None:
    assert (np.asarray(read(data_url(data))) == np.asarray(PICTURE)).all()


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA", "RGBA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (7, 5)])
def test_other_modes_become_rgb(mode: str, size: tuple[int, int]) -> None:
    form = "TIFF" if mode == "CMYK" else "PNG"
    image = Image.new("I;16", size) if mode == "I;16" else PICTURE.resize(size).convert(mode)
    assert read(data_url(encoded(image, form))).size == size


def test_a_photograph_of_several_sizes_is_one_picture() -> None:
    """Telephones write such JPEGs."""
    data = encoded(PICTURE, "MPO", **SEVERAL)
    assert read(data_url(data, "image/jpeg")).size == PICTURE.size


def test_files_below_the_allowed_folder(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    for folder in (allowed, tmp_path):
        PICTURE.save(folder / "picture.png")
    options = {"allowed_local_media_path": str(allowed)}
    assert read(f"file://{allowed}/picture.png", **options).size == PICTURE.size
    for name, complaint in (
        (f"{tmp_path}/picture.png", "must be a subpath"),
        (f"{allowed}/../picture.png", "must be a subpath"),
        (f"{allowed}/missing.png", "must exist"),
    ):
        with pytest.raises(VLLMValidationError, match=complaint):
            read(f"file://{name}", **options)


def test_hosts_that_are_not_named_are_not_fetched_from() -> None:
    with pytest.raises(VLLMValidationError, match="allowed domains"):
        read("https://other.example/a.png", allowed_media_domains=["pictures.example"])


@pytest.mark.slow
def test_an_address_that_cannot_be_reached() -> None:
    with pytest.raises(VLLMValidationError, match="cannot be fetched"):
        read("http://127.0.0.1:1/a.png", allowed_media_domains=["127.0.0.1"])
