"""Reads images and videos from bytes that anybody may have sent.

Images that are too large, and animations, are refused by their header, before they are decoded. A
video's frames come through vLLM's decoder, or as JPEGs one by one. FFmpeg, which OpenCV uses, also
plays lists that name other files and addresses. So a video must begin like a container file, which
has its pictures in it.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.video import VideoBackend
from vllm.multimodal.video_decoders.base import VideoSourceMetadata, VideoTargetMetadata
from vllm.multimodal.video_decoders.opencv import cv2

from vllm_dllm.requests.media import IMAGE, MAX_BYTES, MAX_FRAMES, VIDEO, sample_frame_indices

MAX_PIXELS = 50_000_000
"""The most pixels of an image, which take 150 MB when it is decoded."""


class CarefulImageIO(ImageMediaIO):
    """vLLM's reader of images, with checks before it decodes. Errors are VLLMValidationError."""

    max_pixels = MAX_PIXELS

    @classmethod
    def with_options_of(cls, media_io: ImageMediaIO) -> "CarefulImageIO":
        """Makes a reader with the options of one of vLLM's."""
        return cls(media_io.image_mode, **media_io.kwargs)

    def get_max_bytes(self) -> int:
        return MAX_BYTES

    def load_base64(self, media_type: str, data: str) -> Any:
        IMAGE.check_media_type(media_type)
        return super().load_base64(media_type, data)

    def load_file(self, filepath: Path) -> Any:
        IMAGE.check_file(filepath)
        return super().load_file(filepath)

    def load_bytes(self, data: bytes) -> Any:
        IMAGE.check_num_bytes(len(data))
        with IMAGE.decoding():
            try:
                with open_image(BytesIO(data)) as image:
                    self._check_header(image)
                return super().load_bytes(data)
            except Image.DecompressionBombError as error:
                raise self._too_large("more") from error

    def _check_header(self, image: Image.Image) -> None:
        """Raises VLLMValidationError for an image that is too large, or an animation."""
        if image.width * image.height > self.max_pixels:
            raise self._too_large(f"{image.width} x {image.height}")
        # A photograph of several sizes is no animation: cameras write such JPEGs.
        if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
            raise IMAGE.error(
                "An image must be a single picture, got several frames or pages. Send the one that "
                "is meant."
            )

    def _too_large(self, size: str) -> VLLMValidationError:
        return IMAGE.error(
            f"An image may have at most {self.max_pixels} pixels, got {size}. Send a smaller one: "
            f"the model sees it much smaller anyway."
        )


MAX_FRAME_PIXELS = 10_000_000
"""More than 4K. The frames that the model sees take 960 MB when they are decoded."""
MAX_FILE_FRAMES = 108_000
"""An hour of 30 frames a second. Frames that the model does not see are decoded, too."""


class CarefulFrameIO(CarefulImageIO):
    """The reader of single frames, which are JPEGs."""

    max_pixels = MAX_FRAME_PIXELS


class CarefulVideoIO(VideoMediaIO):
    """vLLM's reader of videos, with checks before it decodes. Errors are VLLMValidationError."""

    @classmethod
    def with_options_of(cls, media_io: VideoMediaIO) -> "CarefulVideoIO":
        """Makes a reader with the options of one of vLLM's."""
        asked = media_io.num_frames
        num_frames = asked if 0 < asked < MAX_FRAMES else MAX_FRAMES
        image_io = CarefulFrameIO.with_options_of(media_io.image_io)
        made = cls(image_io, num_frames, **media_io.kwargs)
        # A user may have chosen another loader than vLLM's default.
        is_default = type(media_io.video_loader) is VideoBackend
        made.video_loader = EvenFramesBackend() if is_default else media_io.video_loader
        return made

    def get_max_bytes(self) -> int:
        return MAX_BYTES

    def load_base64(self, media_type: str, data: str) -> Any:
        VIDEO.check_media_type(media_type)
        if media_type.lower() != "video/jpeg":
            return super().load_base64(media_type, data)
        VIDEO.check_num_bytes(len(data) * 3 // 4)
        if (count := data.count(",") + 1) > self.num_frames:
            raise VIDEO.error(
                f"A video of single JPEGs may have at most {self.num_frames} frames, got {count}. "
                f"Leave some out."
            )
        with VIDEO.decoding():
            return super().load_base64(media_type, data)

    def load_file(self, filepath: Path) -> Any:
        VIDEO.check_file(filepath)
        return super().load_file(filepath)

    def load_bytes(self, data: bytes) -> Any:
        VIDEO.check_num_bytes(len(data))
        if not _is_container(data):
            raise VIDEO.error(
                "A video must be an MP4, MOV, WebM, Matroska or AVI file, got another format. "
                "Convert it, or send its frames as data:video/jpeg;base64,… with a comma between "
                "two."
            )
        with VIDEO.decoding():
            return super().load_bytes(data)


def _is_container(data: bytes) -> bool:
    """Returns whether a file begins like a container of video."""
    return (
        data[4:8] == b"ftyp"  # MP4, MOV
        or data[:4] == b"\x1a\x45\xdf\xa3"  # WebM, Matroska
        or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")
    )


class EvenFramesBackend(VideoBackend):
    """vLLM's decoder of video files, for the frames that transformers' processor takes."""

    @classmethod
    def compute_frames_index_to_sample(
        cls, source: VideoSourceMetadata, target: VideoTargetMetadata, **_: Any
    ) -> list[int]:
        """Returns the indices of the frames to decode. Raises VLLMValidationError for a file with
        none or too many."""
        total = source.total_frames_num
        if not 0 < total <= MAX_FILE_FRAMES:
            raise VIDEO.error(
                f"A video's file must have 1 to {MAX_FILE_FRAMES} frames, got {total}. Send a "
                f"whole one, a part of it, or one with fewer frames a second."
            )
        count = min(target.num_frames, total)
        if target.fps > 0:
            count = min(count, max(1, int(source.duration * target.fps)))
        return sample_frame_indices(total, count)

    @classmethod
    def read_frames(
        cls, cap: Any, frame_idx: list[int], total_frames_num: int, **options: Any
    ) -> tuple[np.ndarray, list[int]]:
        """Decodes the frames `frame_idx`, and returns them and the indices of those that could be
        decoded. Raises VLLMValidationError if frames are too large, or more than one of them is
        damaged: a file's header may count one frame too many."""
        width, height = (
            int(cap.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        )
        if width * height > MAX_FRAME_PIXELS:
            raise VIDEO.error(
                f"A video's frames may have at most {MAX_FRAME_PIXELS} pixels, got {width} x "
                f"{height}. Send a smaller one: the model sees them much smaller anyway."
            )
        frames, found = super().read_frames(cap, frame_idx, total_frames_num, **options)
        if not found or len(found) < len(frame_idx) - 1:
            raise VIDEO.error(
                f"The video cannot be read: {len(frame_idx)} frames of it were to be seen, and "
                f"{len(found)} can be. Send {VIDEO.whole}."
            )
        return frames, found
