"""Where an image or a video may come from. Both ways of a server, waiting or not, give the same."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from tests.pictures import data_url, grey_frames, write_video
from vllm_dllm.requests import media
from vllm_dllm.requests.media_url import CONNECTOR

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
def test_refused(kind: str, url: str, complaint: str) -> None:
    assert complaint.format(kind=kind) in refusal(kind, url.format(kind=kind))


@kinds
def test_files_below_the_allowed_folder(tmp_path: Path, kind: str) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    for folder in (allowed, tmp_path):
        if kind == "image":
            PICTURE.save(folder / "it.png")
        else:
            (
                write_video(folder / "a.mp4", grey_frames(3)),
                (folder / "a.mp4").rename(folder / "it.png"),
            )
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
