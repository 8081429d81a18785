"""Reads images and videos from bytes that anybody may have sent: from data URLs, and from the files
and web addresses that the server was started to read. All other URLs are refused with HTTP 400.

Images that are too large, and animations, are refused by their header, before they are decoded. A
video's frames come through vLLM's decoder, or as JPEGs one by one.

FFmpeg, which OpenCV uses, also plays lists that name other files and addresses. So a video must
begin like a container file, which has its pictures in it.
"""

import os
import reprlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    ImageMediaIO,
    MediaConnector,
    VideoMediaIO,
)
from vllm.multimodal.video import VideoBackend
from vllm.multimodal.video_decoders.base import VideoSourceMetadata, VideoTargetMetadata
from vllm.multimodal.video_decoders.opencv import cv2

from vllm_dllm.requests import media

MAX_PIXELS = 50_000_000
"""The most pixels of an image. Decoded they take 150 MB."""


class CarefulImageIO(ImageMediaIO):
    """vLLM's reader of images, with checks before it decodes. All that is refused or cannot be
    decoded raises VLLMValidationError."""

    max_pixels = MAX_PIXELS

    @classmethod
    def with_options_of(cls, media_io: ImageMediaIO) -> "CarefulImageIO":
        """Returns a new reader with the options of one of vLLM's readers and, since vLLM 0.33, with
        the budget of decoded bytes that the readers of a request share."""
        made = cls(media_io.image_mode, **media_io.kwargs)
        made.decoded_budget = getattr(media_io, "decoded_budget", None)
        return made

    def get_max_bytes(self) -> int:
        """Returns the most bytes that vLLM may fetch for an image."""
        return media.MAX_BYTES

    def load_base64(self, media_type: str, data: str) -> Any:
        media.IMAGE.check_media_type(media_type)
        return super().load_base64(media_type, data)

    def load_file(self, filepath: Path) -> Any:
        media.IMAGE.check_file(filepath)
        return super().load_file(filepath)

    def load_bytes(self, data: bytes) -> Any:
        """Returns the decoded image of a file's bytes."""
        media.IMAGE.check_num_bytes(len(data))
        with media.IMAGE.decoding():
            try:
                with open_image(BytesIO(data)) as image:
                    if image.width * image.height > self.max_pixels:
                        raise self._too_large(f"{image.width} x {image.height}")
                    # A photograph of several sizes is no animation: cameras write such JPEGs.
                    is_photograph = image.format in ("JPEG", "MPO")
                    if not is_photograph and getattr(image, "is_animated", False):
                        raise media.IMAGE.error(
                            "An image must be a single picture, got several frames or pages. Send "
                            "the one that is meant."
                        )
                return super().load_bytes(data)
            except Image.DecompressionBombError as error:
                raise self._too_large("more") from error

    def _too_large(self, size: str) -> VLLMValidationError:
        """Returns the error for an image of too many pixels. Does not raise it."""
        return media.IMAGE.error(
            f"An image may have at most {self.max_pixels} pixels, got {size}. Send a smaller one: "
            f"the model sees it much smaller anyway."
        )


MAX_FRAME_PIXELS = 10_000_000
"""The most pixels of a video's frame: somewhat more than 4K. The frames that the model sees take
960 MB when they are decoded."""
MAX_FILE_FRAMES = 108_000
"""The most frames of a video's file: an hour at 30 frames a second. Frames that the model does not
see are decoded as well."""


class CarefulFrameIO(CarefulImageIO):
    """The reader of a video's single frames, which are JPEGs."""

    max_pixels = MAX_FRAME_PIXELS


class CarefulVideoIO(VideoMediaIO):
    """vLLM's reader of videos, with checks before it decodes. All that is refused or cannot be
    decoded raises VLLMValidationError."""

    @classmethod
    def with_options_of(cls, media_io: VideoMediaIO) -> "CarefulVideoIO":
        """Returns a new reader with the options of one of vLLM's readers, for at most `MAX_FRAMES`
        frames. Its default decoder becomes `EvenFramesBackend`; one that the user chose stays."""
        limit = media_io.num_frames  # 0 or less: none
        num_frames = limit if 0 < limit < media.MAX_FRAMES else media.MAX_FRAMES
        image_io = CarefulFrameIO.with_options_of(media_io.image_io)
        made = cls(image_io, num_frames, **media_io.kwargs)
        # A user may have chosen another loader than vLLM's default.
        is_default = type(media_io.video_loader) is VideoBackend
        made.video_loader = EvenFramesBackend() if is_default else media_io.video_loader
        return made

    def get_max_bytes(self) -> int:
        """Returns the most bytes that vLLM may fetch for a video."""
        return media.MAX_BYTES

    def load_base64(self, media_type: str, data: str) -> Any:
        """Returns the decoded video of a data URL: a file, or with the type video/jpeg single JPEGs
        with commas between them."""
        media.VIDEO.check_media_type(media_type)
        if media_type.lower() != "video/jpeg":
            return super().load_base64(media_type, data)
        media.VIDEO.check_num_bytes(len(data) * 3 // 4)
        if (count := data.count(",") + 1) > self.num_frames:
            raise media.VIDEO.error(
                f"A video of single JPEGs may have at most {self.num_frames} frames, got {count}. "
                f"Leave some out."
            )
        with media.VIDEO.decoding():
            return super().load_base64(media_type, data)

    def load_file(self, filepath: Path) -> Any:
        media.VIDEO.check_file(filepath)
        return super().load_file(filepath)

    def load_bytes(self, data: bytes) -> Any:
        """Returns the decoded video of a file's bytes, which must be those of a container file."""
        media.VIDEO.check_num_bytes(len(data))
        if not _is_container(data):
            raise media.VIDEO.error(
                "A video must be an MP4, MOV, WebM, Matroska or AVI file, got another format. "
                "Convert it, or send its frames as data:video/jpeg;base64,… with a comma between "
                "two."
            )
        with media.VIDEO.decoding():
            return super().load_bytes(data)


def _is_container(data: bytes) -> bool:
    """Returns whether a file's bytes begin like one of the containers of video that we read."""
    return (
        data[4:8] == b"ftyp"  # MP4, MOV
        or data[:4] == b"\x1a\x45\xdf\xa3"  # WebM, Matroska
        or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")
    )


class EvenFramesBackend(VideoBackend):
    """vLLM's decoder of video files, for the frames that transformers' processor would take."""

    @classmethod
    def compute_frames_index_to_sample(
        cls, source: VideoSourceMetadata, target: VideoTargetMetadata, **_: Any
    ) -> list[int]:
        """Returns the indices of the frames to decode. vLLM calls it before `read_frames`. Raises
        VLLMValidationError if the file has no frames or too many."""
        total = source.total_frames_num
        if not 0 < total <= MAX_FILE_FRAMES:
            raise media.VIDEO.error(
                f"A video's file must have 1 to {MAX_FILE_FRAMES} frames, got {total}. Send a "
                f"whole one, a part of it, or one with fewer frames a second."
            )
        count = min(target.num_frames, total)
        if target.fps > 0:
            count = min(count, max(1, int(source.duration * target.fps)))
        return media.sample_frame_indices(total, count)

    @classmethod
    def read_frames(
        cls, cap: Any, frame_idx: list[int], total_frames_num: int, **options: Any
    ) -> tuple[np.ndarray, list[int]]:
        """Decodes the frames `frame_idx` of the open video `cap`. Returns the frames [n, height,
        width, 3] uint8, and the indices of those that could be decoded. Raises VLLMValidationError
        if frames are too large, or more than one is damaged. One is allowed, since a file's header
        may count one frame too many."""
        width, height = (
            int(cap.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        )
        if width * height > MAX_FRAME_PIXELS:
            raise media.VIDEO.error(
                f"A video's frames may have at most {MAX_FRAME_PIXELS} pixels, got {width} x "
                f"{height}. Send a smaller one: the model sees them much smaller anyway."
            )
        frames, indices = super().read_frames(cap, frame_idx, total_frames_num, **options)
        if not indices or len(indices) < len(frame_idx) - 1:
            raise media.VIDEO.error(
                f"The video cannot be read: {len(frame_idx)} frames of it were to be seen, and "
                f"{len(indices)} can be. Send {media.VIDEO.replacement}."
            )
        return frames, indices


CONNECTOR = "vllm_dllm"
_CONNECTOR_VARIABLE = "VLLM_MEDIA_CONNECTOR"


def use_careful_connector() -> None:
    """Makes `CarefulConnector` this process' media connector, by an environment variable of vLLM's.
    Does nothing if the user has set the variable."""
    os.environ.setdefault(_CONNECTOR_VARIABLE, CONNECTOR)


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class CarefulConnector(MediaConnector):
    """vLLM's media connector, for servers to which anybody may send images and videos. Whatever it
    refuses, or cannot fetch or decode, raises VLLMValidationError."""

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        """Returns the decoded image or video of a URL. Waits for the download."""
        kind = self._check_url(url, media_io)
        with kind.fetching():
            return super().load_from_url(url, _careful_media_io(media_io), **options)

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        """Does what `load_from_url` does, without blocking the event loop."""
        kind = self._check_url(url, media_io)
        with kind.fetching():
            return await super().load_from_url_async(url, _careful_media_io(media_io), **options)

    def _check_url(self, url: str, media_io: Any) -> media.MediaKind:
        """Returns the kind of media that vLLM's reader `media_io` reads. Raises VLLMValidationError
        if this server does not read such URLs, or a data URL is not in base64."""
        kind = media.VIDEO if isinstance(media_io, VideoMediaIO) else media.IMAGE
        if not isinstance(url, str):  # in a part that vLLM does not check
            raise kind.error(
                f"{kind.subject}'s URL must be a text, got {reprlib.repr(url)}. Send it as "
                f"{kind.example}"
            )
        scheme = url.partition(":")[0].lower()
        is_web = scheme in ("http", "https")
        if is_web and not self.allowed_media_domains:
            raise kind.error(
                f"{kind.subject}'s URL must be a data URL on this server, got a web address: it "
                f"fetches nothing. Send the {kind.name} itself as {kind.example}, or start "
                f"the server with --allowed-media-domains."
            )
        if scheme == "file" and self.allowed_local_media_path is None:
            raise kind.error(
                f"{kind.subject}'s URL must be a data URL on this server, got a file: it reads "
                f"none. Send the {kind.name} itself as {kind.example}, or start the server "
                f"with --allowed-local-media-path."
            )
        if not is_web and scheme not in ("file", "data"):
            raise kind.error(
                f"{kind.subject}'s URL must begin with data:, file: or https:, got {url[:32]!r}. "
                f"Send the {kind.name} itself as {kind.example}"
            )
        if scheme == "data" and not url.partition(",")[0].lower().endswith(";base64"):
            raise kind.error(
                f"{kind.subject}'s data URL must be in base64, got {url[:32]!r}. Send it as "
                f"{kind.example}"
            )
        return kind


def _careful_media_io(media_io: Any) -> Any:
    """Returns our reader in the place of vLLM's reader. Readers of other media stay as they are."""
    if isinstance(media_io, VideoMediaIO):
        return CarefulVideoIO.with_options_of(media_io)
    if isinstance(media_io, ImageMediaIO):
        return CarefulImageIO.with_options_of(media_io)
    return media_io
