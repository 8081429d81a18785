"""Where an image or a video may come from, and what comes as one: pictures and frames are read,
everything else is refused in words, undecoded. Both ways of a server give the same."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import VideoMetadata, default_sample_indices_fn
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from tests.pictures import data_url, encoded, grey_frames, png_header, write_video
from vllm_dllm.requests import media, media_bytes
from vllm_dllm.requests.media import (
    MAX_FRAMES,
    check_image_size,
    format_timestamp,
    sample_frame_indices,
    sample_frames,
)
from vllm_dllm.requests.media_bytes import (
    CONNECTOR,
    MAX_FILE_FRAMES,
    MAX_FRAME_PIXELS,
    MAX_PIXELS,
    CarefulImageIO,
    CarefulVideoIO,
    EvenFramesBackend,
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


def jpegs(images: list[Image.Image]) -> str:
    parts = [data_url(encoded(image, "JPEG")).partition(",")[2] for image in images]
    return "data:video/jpeg;base64," + ",".join(parts)


@pytest.mark.parametrize("suffix", ["mp4", "avi", "mkv", "webm"])
@pytest.mark.parametrize("total", [2, MAX_FRAMES, MAX_FRAMES + 1, 100])
def test_frames_are_taken_as_transformers_takes_them(
    tmp_path: Path, suffix: str, total: int
) -> None:
    data = write_video(tmp_path / f"a.{suffix}", grey_frames(total))
    frames, metadata = read("video", data_url(data, f"video/{suffix}"))
    count = min(total, MAX_FRAMES)
    known = VideoMetadata(total_num_frames=total, fps=10.0)
    expected = default_sample_indices_fn(known, num_frames=count).tolist()
    assert metadata["frames_indices"] == expected and metadata["fps"] == pytest.approx(10.0)
    assert frames.shape == (count, 48, 64, 3) and frames.dtype == np.uint8
    # A codec moves brightness by a little; which frame it is can be told.
    assert np.abs(frames.mean(axis=(1, 2, 3)) - expected).max() < 4


def test_a_server_may_take_fewer_frames(tmp_path: Path) -> None:
    url = data_url(write_video(tmp_path / "a.mp4", grey_frames(100)), "video/mp4")

    def indices(**settings: Any) -> list[int]:
        return read("video", url, media_io_kwargs={"video": settings})[1]["frames_indices"]

    assert indices(num_frames=4) == [0, 25, 50, 75]
    assert indices(fps=1) == [10 * i for i in range(10)]
    assert len(indices(num_frames=-1)) == len(indices(num_frames=1000)) == MAX_FRAMES


def test_single_jpegs_are_frames_a_second_apart() -> None:
    images = [Image.fromarray(frame) for frame in grey_frames(3)]
    frames, metadata = read("video", jpegs(images))
    assert frames.shape == (3, 48, 64, 3)
    assert (metadata["fps"], metadata["frames_indices"]) == (1.0, [0, 1, 2])


GREY = Image.new("RGB", (8, 8))
PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


def mp4(data: bytes) -> str:
    return data_url(data, "video/mp4")


REFUSED = {
    "empty": (mp4(b""), "got another format"),
    "text": (mp4(b"text"), "got another format"),
    "a playlist": (mp4(PLAYLIST), "got another format"),
    "a picture": (mp4(encoded(GREY)), "got another format"),
    "zeros": (mp4(b"\0\0\0\x18ftypmp42" + bytes(5000)), "cannot be read: Could not open"),
    "more JPEGs": (jpegs([GREY] * 33), "at most 32 frames, got 33"),
    "two sizes": (jpegs([GREY, GREY.resize((9, 8))]), "same shape"),
    "a JPEG that is none": (jpegs([GREY]) + ",AAAA", "cannot be read"),
    "no JPEG": ("data:video/jpeg;base64,", "cannot be read"),
    "a large JPEG": (
        data_url(png_header(4_000, 3_000), "video/jpeg"),
        f"at most {MAX_FRAME_PIXELS} pixels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    url, complaint = REFUSED[name]
    assert complaint in refusal("video", url)


def test_frames_that_cannot_be_read() -> None:
    """One may be missing: a header may count one that is none. The rest is seen as it is."""

    class Capture:
        """Of OpenCV, which reads `good` frames of the ten."""

        def __init__(self, good: int) -> None:
            self.good = good

        def get(self, _: int) -> float:
            return 8.0

        def grab(self) -> bool:
            self.good -= 1
            return self.good >= 0

        def retrieve(self) -> tuple[bool, np.ndarray]:
            return True, np.zeros((8, 8, 3), np.uint8)

    wanted = list(range(10))
    assert EvenFramesBackend.read_frames(Capture(9), wanted, 10)[1] == wanted[:9]
    for good in (0, 8):
        with pytest.raises(VLLMValidationError, match=f"10 frames of it .* and {good} can be"):
            EvenFramesBackend.read_frames(Capture(good), wanted, 10)


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for suffix in ("mp4", "avi", "mkv", "webm"):
        data = write_video(tmp_path / f"a.{suffix}", grey_frames(10))
        num_read = 0
        for _ in range(30):
            hit = np.frombuffer(data, np.uint8).copy()
            hit[rng.integers(16, len(hit), size=rng.integers(1, 20))] = rng.integers(256)
            try:
                url = data_url(hit.tobytes(), f"video/{suffix}")
                frames, _ = MEDIA_CONNECTOR_REGISTRY.load(CONNECTOR).fetch_video(url).media
            except VLLMValidationError:
                continue
            assert frames.ndim == 4 and len(frames) <= MAX_FRAMES
            num_read += 1
        assert num_read < 30  # some hit what must be right


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = mp4(write_video(tmp_path / "a.mp4", grey_frames(20)))
    assert MAX_FRAME_PIXELS > 3840 * 2160 and MAX_FILE_FRAMES >= 3600 * 30
    for name, most, complaint in (
        ("MAX_FILE_FRAMES", 19, "1 to 19 frames, got 20"),
        ("MAX_FRAME_PIXELS", 3000, "at most 3000 pixels, got 64 x 48"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(media_bytes, name, most)
            assert complaint in refusal("video", url)


def test_arrays_of_more_frames_are_thinned_out() -> None:
    frames = np.stack(grey_frames(70))
    seen, seconds = sample_frames(frames, {"fps": 2.0}, 32)
    kept = sample_frame_indices(70, 32)
    assert seen[:, 0, 0, 0].tolist() == kept and seconds == [i / 2 for i in kept]
    # What a file does not say is 24 frames a second.
    for fps in (None, 0.0, float("nan"), -1.0):
        assert sample_frames(frames[:2], {"fps": fps}, 32)[1] == [0, 1 / 24]


@pytest.mark.parametrize(
    ("change", "indices", "complaint"),
    [
        (lambda frames: frames.astype(np.float32), None, "array of uint8"),
        (lambda frames: frames[..., :1], None, r"uint8 .* got uint8 \[3, 48, 64, 1\]"),
        (lambda frames: frames[:0], [], "array of uint8"),
        (lambda frames: frames[:2], [0, 1, 2], "each of its 2 frames, got 3"),
    ],
)
def test_arrays_that_are_no_videos(change: Any, indices: list[int], complaint: str) -> None:
    with pytest.raises(VLLMValidationError, match=complaint):
        sample_frames(change(np.stack(grey_frames(3))), {"frames_indices": indices}, 32)


def test_timestamps() -> None:
    found = [format_timestamp(seconds) for seconds in (0, 59.99, 60, 3725.5)]
    assert found == ["00:00", "00:59", "01:00", "62:05"]
