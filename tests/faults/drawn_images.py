"""Pictures of every kind, ordinary, odd and broken, as parts of a message, drawn by hypothesis."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from PIL import Image

from tests.pictures import data_url, encoded, png_header

ROTATED = Image.Exif()
ROTATED[0x0112] = 6  # orientation: turn it by a quarter
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (64, 64))]}


@dataclass(frozen=True)
class Picture:
    url: Any
    is_served: bool | None  # None: it depends on the bytes that were hit


@cache
def noise(size: tuple[int, int] = (64, 64), mode: str = "RGB") -> Image.Image:
    image = Image.effect_noise(size, 100)
    if mode == "I;16":
        return Image.frombytes(mode, size, 2 * image.tobytes())
    return image.convert(mode)


SERVED: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: encoded(noise(), "PNG"),
    "one pixel": lambda: encoded(noise((1, 1)), "PNG"),
    "a strip": lambda: encoded(noise((900, 3)), "PNG"),
    "grey": lambda: encoded(noise(mode="L"), "PNG"),
    "black and white": lambda: encoded(noise(mode="1"), "PNG"),
    "16 bits": lambda: encoded(noise(mode="I;16"), "PNG"),
    "transparent": lambda: encoded(noise(mode="RGBA"), "PNG"),
    "transparent grey": lambda: encoded(noise(mode="LA"), "PNG"),
    "palette with transparency": lambda: encoded(noise(mode="P"), "PNG", transparency=3),
    "palette with alphas": lambda: encoded(
        noise(mode="P"), "PNG", transparency=bytes(range(0, 256, 2))
    ),
    "JPEG": lambda: encoded(noise(), "JPEG"),
    "progressive JPEG": lambda: encoded(noise(), "JPEG", progressive=True),
    "CMYK": lambda: encoded(noise(mode="CMYK"), "JPEG"),
    "rotated by EXIF": lambda: encoded(noise((40, 20)), "JPEG", exif=ROTATED),
    "damaged EXIF": lambda: encoded(noise(), "JPEG", exif=b"Exif\0\0nonsense"),
    "a photograph": lambda: encoded(Image.new("RGB", (4000, 3000), "green"), "JPEG"),
    "GIF": lambda: encoded(noise(), "GIF"),
    "WebP": lambda: encoded(noise(), "WEBP"),
    "BMP": lambda: encoded(noise(), "BMP"),
    "TIFF": lambda: encoded(noise(mode="CMYK"), "TIFF"),
    "bytes behind its end": lambda: encoded(noise(), "PNG") + bytes(100),
}
REFUSED: dict[str, Callable[[], bytes]] = {
    "no bytes": lambda: b"",
    "zeros": lambda: bytes(5000),
    "text": lambda: b"not a picture",
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>',
    "no pixels": lambda: png_header(0, 5),
    "400 million pixels": lambda: png_header(20_000, 20_000),
    "one row more than a number holds": lambda: png_header(2**31 - 1, 2**31 - 1),
    "64 million pixels": lambda: png_header(8_000, 8_000),
    "only a header": lambda: png_header(64, 64),
    "animated GIF": lambda: encoded(noise(), "GIF", **FRAMES),
    "animated PNG": lambda: encoded(noise(), "PNG", **FRAMES),
    "animated WebP": lambda: encoded(noise(), "WEBP", **FRAMES),
    "pages": lambda: encoded(noise(), "TIFF", **FRAMES),
}
WRONG_URLS: tuple[Any, ...] = (
    *("", "nonsense", "data:", "data:,", "data:image/png", "data:image/png;base64"),
    *("data:image/png;base64,", "data:image/png;base64,***", "data:image/png;base64,A"),
    *("data:image/png,abc", "data:;base64,AAAA", "data:text/html;base64,PGI+"),
    *("https://example.com/a.png", "http://127.0.0.1:1/a.png", "http://[::1", "HTTP://a"),
    *("file:///etc/passwd", "file://host/a", "file:///dev/zero", "ftp://a/b.png", "blob:1"),
    *("javascript:1", "\0", "data:image/png;base64,\0", "é" * 50, None, 5, [], {}),
)


@cache
def made(name: str) -> bytes:
    return (SERVED | REFUSED)[name]()


@st.composite
def pictures(draw: Any) -> Picture:
    kind = draw(st.integers(0, 9))
    if kind < 5:
        # The media type is the client's word; the bytes tell.
        media_type = draw(st.sampled_from(["image/png", "image/jpeg", "IMAGE/PNG", "image/x"]))
        return Picture(data_url(made(draw(st.sampled_from(sorted(SERVED)))), media_type), True)
    if kind == 5:
        return Picture(data_url(made(draw(st.sampled_from(sorted(REFUSED))))), False)
    if kind == 6:
        return Picture(draw(st.sampled_from(WRONG_URLS)), False)
    if kind == 7:
        media_type = draw(st.sampled_from(["text/plain", "video/mp4", "application/pdf"]))
        return Picture(data_url(made("PNG"), media_type), False)
    data = made(draw(st.sampled_from(["PNG", "JPEG", "CMYK", "rotated by EXIF", "16 bits"])))
    if kind == 8:  # cut short
        return Picture(data_url(data[: len(data) * draw(st.integers(0, 90)) // 100]), False)
    hit = bytearray(data)
    for _ in range(draw(st.integers(1, 20))):
        hit[draw(st.integers(0, len(hit) - 1))] = draw(st.integers(0, 255))
    return Picture(data_url(bytes(hit)), None)


@st.composite
def contents(draw: Any, most: int) -> tuple[list[dict[str, Any]], bool]:
    """Of a message: pictures and texts in any order; and whether a server must refuse it."""
    count = draw(st.sampled_from([1, 1, 1, 2, 3, most, most + 1]))
    shown = [draw(pictures()) for _ in range(min(count, 2))]
    shown += [shown[0]] * (count - len(shown))
    parts: list[dict[str, Any]] = []
    for picture in shown:
        if draw(st.booleans()):
            parts.append({"type": "text", "text": draw(TEXTS)})
        parts.append({"type": "image_url", "image_url": {"url": picture.url}})
    parts.append({"type": "text", "text": draw(TEXTS)})
    return parts, count > most or any(picture.is_served is False for picture in shown)


# The model's own mark of an image is a text like any other.
TEXTS: SearchStrategy[str] = st.sampled_from(["What?", "", "a " * 50, "<|image|>", "é"])
