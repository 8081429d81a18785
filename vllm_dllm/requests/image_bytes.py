"""Images as clients send them: where they may come from, and what may be in them.

Bytes from outside are read with care: Pillow opens a picture's header first, and what is too large
or moves is refused before it is decoded. Everything else that cannot be read is the client's
mistake, too. All of it is answered with HTTP 400.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import requests
from PIL import Image, UnidentifiedImageError
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, ImageMediaIO, MediaConnector

CONNECTOR = "vllm_dllm"
MOST_PIXELS = 50_000_000
"""150 MB when it is decoded."""
MOST_BYTES = 64 << 20
_CONNECTOR_VARIABLE = "VLLM_MEDIA_CONNECTOR"


def read_carefully() -> None:
    """This process reads images by `ImageConnector`, unless the user chose a connector."""
    os.environ.setdefault(_CONNECTOR_VARIABLE, CONNECTOR)


def refused(why: str, value: str | None = None) -> VLLMValidationError:
    return VLLMValidationError(why, parameter="image_url", value=value)


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class ImageConnector(MediaConnector):
    """vLLM's, for servers that anybody may send images to."""

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        self._check_source(url)
        with _failures_are_the_clients():
            return super().load_from_url(url, _careful(media_io), **options)

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        self._check_source(url)
        with _failures_are_the_clients():
            return await super().load_from_url_async(url, _careful(media_io), **options)

    def _check_source(self, url: str) -> None:
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            if not self.allowed_media_domains:
                raise refused(
                    "An image's URL must be a data URL on this server, got a web address: it "
                    "fetches nothing. Send the image itself as data:image/png;base64,…, or start "
                    "the server with --allowed-media-domains."
                )
        elif scheme == "file":
            if self.allowed_local_media_path is None:
                raise refused(
                    "An image's URL must be a data URL on this server, got a file: it reads none. "
                    "Send the image itself as data:image/png;base64,…, or start the server with "
                    "--allowed-local-media-path."
                )
        elif scheme != "data":
            raise refused(
                f"An image's URL must begin with data:, file: or https:, got {url[:32]!r}. Send "
                f"the image itself as data:image/png;base64,…"
            )
        elif not url.partition(",")[0].lower().endswith(";base64"):
            raise refused(
                f"An image's data URL must be in base64, got {url[:32]!r}. Send it as "
                f"data:image/png;base64,…"
            )


class CarefulImageIO(ImageMediaIO):
    def get_max_bytes(self) -> int:
        return MOST_BYTES

    def load_base64(self, media_type: str, data: str) -> Any:
        if media_type and not media_type.lower().startswith("image/"):
            raise refused(
                f"An image's media type must begin with image/, got {media_type[:32]!r}. Send a "
                f"picture, in PNG or JPEG for example."
            )
        return super().load_base64(media_type, data)

    def load_file(self, filepath: Path) -> Any:
        if not filepath.is_file():
            raise refused(f"An image's file must exist, and {filepath} does not. Correct the path.")
        _check_size(filepath.stat().st_size)
        return super().load_file(filepath)

    def load_bytes(self, data: bytes) -> Any:
        _check_size(len(data))
        try:
            with open_image(BytesIO(data)) as image:
                _check_header(image)
            return super().load_bytes(data)
        except (VLLMClientError, MemoryError):  # the latter is no fault of the picture's
            raise
        except Image.DecompressionBombError as error:
            raise _too_large("more") from error
        except Exception as error:  # decoders raise anything when bytes are damaged
            raise refused(
                f"The image cannot be read: {_reason(error)}. Send a whole picture, in PNG or JPEG "
                f"for example."
            ) from error


def _careful(media_io: Any) -> Any:
    if not isinstance(media_io, ImageMediaIO):
        return media_io
    return CarefulImageIO(media_io.image_mode, **media_io.kwargs)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MOST_BYTES:
        raise refused(
            f"An image may have at most {MOST_BYTES} bytes, got {num_bytes}. Send a smaller one."
        )


def _check_header(image: Image.Image) -> None:
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(f"{image.width} x {image.height}")
    # A photograph of several sizes is no animation: cameras write such JPEGs.
    if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
        raise refused(
            "An image must be a single picture, got several frames or pages. Send the one that is "
            "meant."
        )


def _too_large(size: str) -> VLLMValidationError:
    return refused(
        f"An image may have at most {MOST_PIXELS} pixels, got {size}. Send a smaller one: the "
        f"model sees it much smaller anyway."
    )


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "its format is not known, or is no picture's"
    return str(error) or type(error).__name__


@contextmanager
def _failures_are_the_clients() -> Iterator[None]:
    try:
        yield
    except (OSError, aiohttp.ClientError, requests.RequestException) as error:
        raise refused(
            f"The image cannot be fetched: {_reason(error)}. Check its URL, or send the image "
            f"itself as data:image/png;base64,…"
        ) from error
    except ValueError as error:
        if isinstance(error, VLLMClientError):
            raise
        raise refused(f"The image's URL cannot be used: {_reason(error)}. Correct it.") from error
