"""Images and videos that a client sent and that cannot be used: in which words they are refused.

Bytes from outside may be anything, and decoders raise anything when they are damaged. All of it is
the client's mistake, and is answered with HTTP 400.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import requests
from PIL import UnidentifiedImageError
from vllm.exceptions import VLLMClientError, VLLMValidationError

MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Kind:
    """One kind of media, and the words for it."""

    name: str  # in vLLM's parts of a message, too: image_url
    one: str
    whole: str  # what to send instead of a damaged one
    example: str  # of a data URL

    def refused(self, why: str) -> VLLMValidationError:
        return VLLMValidationError(why, parameter=f"{self.name}_url")

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > MOST_BYTES:
            raise self.refused(
                f"{self.one} may have at most {MOST_BYTES} bytes, got {num_bytes}. Send a smaller "
                f"one."
            )

    def check_type(self, media_type: str) -> None:
        if media_type and not media_type.lower().startswith(f"{self.name}/"):
            raise self.refused(
                f"{self.one}'s media type must begin with {self.name}/, got {media_type[:32]!r}. "
                f"Send {self.whole}."
            )

    def check_file(self, path: Path) -> None:
        if not path.is_file():
            raise self.refused(
                f"{self.one}'s file must exist, and {path} does not. Correct the path."
            )
        self.check_size(path.stat().st_size)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        try:
            yield
        except (VLLMClientError, MemoryError):  # the latter is no fault of the client's
            raise
        except Exception as error:
            raise self.refused(
                f"The {self.name} cannot be read: {_reason(error)}. Send {self.whole}."
            ) from error

    @contextmanager
    def fetching(self) -> Iterator[None]:
        try:
            yield
        except (OSError, aiohttp.ClientError, requests.RequestException) as error:
            raise self.refused(
                f"The {self.name} cannot be fetched: {_reason(error)}. Check its URL, or send the "
                f"{self.name} itself as {self.example}"
            ) from error
        except ValueError as error:
            if isinstance(error, VLLMClientError):
                raise
            raise self.refused(
                f"The {self.name}'s URL cannot be used: {_reason(error)}. Correct it."
            ) from error


IMAGE = Kind(
    "image", "An image", "a whole picture, in PNG or JPEG for example", "data:image/png;base64,…"
)
VIDEO = Kind(
    "video", "A video", "a whole video, in MP4 or WebM for example", "data:video/mp4;base64,…"
)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "its format is not known, or is no picture's"
    return str(error) or type(error).__name__
