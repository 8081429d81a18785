"""Checks the images and videos of a prompt, and chooses which frames of a video the model sees.

All checks raise VLLMValidationError, which becomes HTTP 400. A file that cannot be decoded raises
it, too: decoders raise any error for damaged bytes. Frames and their times are those of
transformers' `Gemma4VideoProcessor` and `Gemma4Processor.replace_video_token` (`models/gemma4`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import requests
import torch
from PIL import UnidentifiedImageError
from vllm.exceptions import VLLMClientError, VLLMValidationError

MAX_ITEMS: Mapping[str, int] = {"image": 16, "video": 2}
"""The most images or videos of a prompt, unless --limit-mm-per-prompt says otherwise: a server
keeps all of them in memory. Two videos of 32 frames have as many image tokens as 16 images."""


def check_media_count(modality: str, count: int, most: Mapping[str, int]) -> None:
    """Raises VLLMValidationError unless a prompt may have `count` items of a modality: "image",
    "video" or "audio". `most` has the most items of each modality on this server; it is empty for a
    checkpoint that reads only text."""
    if not most:
        raise VLLMValidationError(
            f"This checkpoint reads text only, got {count} {modality}(s): it has no vision tower, "
            f"or no settings of an image processor. Send text.",
            parameter=modality,
        )
    if modality == "video" and modality not in most:
        raise VLLMValidationError(
            f"This checkpoint reads text and images, got {count} video(s): its tokenizer has no "
            f"token <|video|>. Send text, or single pictures as images.",
            parameter=modality,
        )
    if modality not in most:
        raise VLLMValidationError(
            f"This model reads text, images and videos, got {count} {modality}(s). Send text, "
            f"single pictures as images, or a video.",
            parameter=modality,
        )
    if count > most[modality]:
        raise VLLMValidationError(
            f"A prompt may have at most {most[modality]} {modality}s on this server, got {count}. "
            f"Send fewer, or start the server with a higher --limit-mm-per-prompt.",
            parameter=modality,
        )


def check_image_size(width: int, height: int, unit: int, max_tokens: int) -> None:
    """Raises VLLMValidationError if a model that does not scale images cannot take one of this size
    in pixels. `unit` x `unit` pixels become a token, of which there may be `max_tokens`."""
    if width % unit or height % unit or width * height > max_tokens * unit**2:
        raise VLLMValidationError(
            f"This checkpoint takes images as they are: both sides must be multiples of {unit} "
            f"pixels, with at most {max_tokens * unit**2} pixels in all, got {width} x {height}. "
            f"Scale or crop the image.",
            parameter="image",
        )


def check_pixels(
    patches: torch.Tensor,  # of any shape
) -> torch.Tensor:
    """Returns the patches of images. Raises VLLMValidationError for arrays whose values are not
    colours. A NaN would stay in the KV cache, where attention multiplies it by 0 when later
    requests reuse the block: their answers would be wrong."""
    if not (patches.abs() <= 255).all():  # False for NaN
        raise VLLMValidationError(
            f"The values of an image must be colours, from 0 to 255, got {patches.min():g} to "
            f"{patches.max():g} after scaling. Correct them.",
            parameter="image",
        )
    return patches


def check_no_processor_options(options: Mapping[str, object]) -> None:
    """Raises VLLMValidationError if a request has settings of its own for the image processor."""
    if options:
        raise VLLMValidationError(
            f"mm_processor_kwargs are a setting of the server for this model, got "
            f"{sorted(options)} in a request. Leave them out.",
            parameter="mm_processor_kwargs",
        )


MAX_FRAMES = 32
"""transformers' default of `num_frames`."""
_DEFAULT_FPS = 24.0  # transformers', for videos that do not say it


def sample_frame_indices(total: int, count: int) -> list[int]:
    """Returns `count` indices into `total` frames, rising and evenly spread, as transformers'
    `default_sample_indices_fn` does."""
    return [i * total // count for i in range(count)]


def sample_frames(
    frames: Any,  # [n, height, width, 3] uint8
    metadata: Mapping[str, Any],  # may have `frames_indices` and `fps` of the original video
    most: int,
) -> tuple[np.ndarray, list[float]]:
    """Returns at most `most` frames of a video, [n, height, width, 3] uint8, and the time of each
    frame in seconds. Raises VLLMValidationError if `frames` are not a video, or `metadata` do not
    fit them."""
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or frames.size == 0:
        raise VLLMValidationError(
            f"A video must be an array of uint8 [frames, height, width, 3], got {frames.dtype} "
            f"{list(frames.shape)}. Convert it.",
            parameter="video",
        )
    indices = metadata.get("frames_indices")
    indices = list(range(len(frames))) if indices is None else list(indices)
    if len(indices) != len(frames):
        raise VLLMValidationError(
            f"frames_indices of a video must name each of its {len(frames)} frames, got "
            f"{len(indices)}. Leave it out, or correct it.",
            parameter="video",
        )
    sampled = sample_frame_indices(len(frames), min(most, len(frames)))
    fps = metadata.get("fps") or _DEFAULT_FPS
    fps = fps if fps > 0 else _DEFAULT_FPS  # damaged files say anything
    return frames[sampled], [indices[i] / fps for i in sampled]


def format_timestamp(seconds: float) -> str:
    """Returns seconds as minutes and seconds, such as `03:07`. Fractions are cut off."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


MAX_BYTES = 64 << 20
"""The most bytes of an image's or a video's file."""


@dataclass(frozen=True)
class MediaKind:
    """Images or videos: the words for them in errors, and the checks that both share. The checks
    raise VLLMValidationError."""

    name: str  # "image" or "video"; also in the parts of a message, such as image_url
    subject: str  # the name with an article, as a sentence begins
    replacement: str  # what to send instead of a damaged file
    example: str  # an example of a data URL

    def error(self, why: str) -> VLLMValidationError:
        """Returns the error for a request's image or video. Does not raise it."""
        return VLLMValidationError(why, parameter=f"{self.name}_url")

    def check_num_bytes(self, num_bytes: int) -> None:
        """Raises VLLMValidationError for a file of more than `MAX_BYTES` bytes."""
        if num_bytes > MAX_BYTES:
            raise self.error(
                f"{self.subject} may have at most {MAX_BYTES} bytes, got {num_bytes}. Send a "
                f"smaller one."
            )

    def check_media_type(self, media_type: str) -> None:
        """Raises VLLMValidationError unless a MIME type is of this kind, or empty."""
        if media_type and not media_type.lower().startswith(f"{self.name}/"):
            raise self.error(
                f"{self.subject}'s media type must begin with {self.name}/, got "
                f"{media_type[:32]!r}. Send {self.replacement}."
            )

    def check_file(self, path: Path) -> None:
        """Raises VLLMValidationError if a file does not exist or is too large."""
        if not path.is_file():
            raise self.error(
                f"{self.subject}'s file must exist, and {path} does not. Correct the path."
            )
        self.check_num_bytes(path.stat().st_size)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Turns all errors of a decoder inside of the block into VLLMValidationError. vLLM's own
        client errors and MemoryError, which is no fault of the client's, pass unchanged."""
        try:
            yield
        except (VLLMClientError, MemoryError):  # the latter is no fault of the client's
            raise
        except Exception as error:
            raise self.error(
                f"The {self.name} cannot be read: {_reason(error)}. Send {self.replacement}."
            ) from error

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Turns errors of a bad URL or connection inside of the block into VLLMValidationError."""
        try:
            yield
        except (OSError, aiohttp.ClientError, requests.RequestException) as error:
            raise self.error(
                f"The {self.name} cannot be fetched: {_reason(error)}. Check its URL, or send the "
                f"{self.name} itself as {self.example}"
            ) from error
        except ValueError as error:
            if isinstance(error, VLLMClientError):
                raise
            raise self.error(
                f"The {self.name}'s URL cannot be used: {_reason(error)}. Correct it."
            ) from error


IMAGE = MediaKind(
    name="image",
    subject="An image",
    replacement="a whole picture, in PNG or JPEG for example",
    example="data:image/png;base64,…",
)
VIDEO = MediaKind(
    name="video",
    subject="A video",
    replacement="a whole video, in MP4 or WebM for example",
    example="data:video/mp4;base64,…",
)


def _reason(error: Exception) -> str:
    """Returns an error's message in words for the client, never empty."""
    if isinstance(error, UnidentifiedImageError):
        return "its format is not known, or is no picture's"
    return str(error) or type(error).__name__
