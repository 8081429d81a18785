"""Bytes of images and videos, read with care.

Pillow opens a picture's header first, and what is too large or moves is refused before it is
decoded. A video's frames come through vLLM's decoder, or as JPEGs one by one. FFmpeg, which is
behind OpenCV, also plays lists that name other files and addresses. So the first bytes must be
those of a container that holds its pictures itself.
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

from vllm_dllm.requests.media import IMAGE, MOST_BYTES, MOST_FRAMES, VIDEO, even_indices

MOST_PIXELS = 50_000_000
"""150 MB when it is decoded."""


class CarefulImageIO(ImageMediaIO):
    most_pixels = MOST_PIXELS

    @classmethod
    def like(cls, media_io: ImageMediaIO) -> "CarefulImageIO":
        return cls(media_io.image_mode, **media_io.kwargs)

    def get_max_bytes(self) -> int:
        return MOST_BYTES

    def load_base64(self, media_type: str, data: str) -> Any:
        IMAGE.check_type(media_type)
        return super().load_base64(media_type, data)

    def load_file(self, filepath: Path) -> Any:
        IMAGE.check_file(filepath)
        return super().load_file(filepath)

    def load_bytes(self, data: bytes) -> Any:
        IMAGE.check_size(len(data))
        with IMAGE.decoding():
            try:
                with open_image(BytesIO(data)) as image:
                    self._check_header(image)
                return super().load_bytes(data)
            except Image.DecompressionBombError as error:
                raise self._too_large("more") from error

    def _check_header(self, image: Image.Image) -> None:
        if image.width * image.height > self.most_pixels:
            raise self._too_large(f"{image.width} x {image.height}")
        # A photograph of several sizes is no animation: cameras write such JPEGs.
        if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
            raise IMAGE.refused(
                "An image must be a single picture, got several frames or pages. Send the one that "
                "is meant."
            )

    def _too_large(self, size: str) -> VLLMValidationError:
        return IMAGE.refused(
            f"An image may have at most {self.most_pixels} pixels, got {size}. Send a smaller one: "
            f"the model sees it much smaller anyway."
        )


MOST_FRAME_PIXELS = 10_000_000
"""More than 4K has. As many frames as the model sees are 960 MB when they are decoded."""
MOST_FILE_FRAMES = 108_000
"""An hour, with 30 a second: frames between those that the model sees are decoded, too."""


class Frame(CarefulImageIO):
    most_pixels = MOST_FRAME_PIXELS


class CarefulVideoIO(VideoMediaIO):
    @classmethod
    def like(cls, media_io: VideoMediaIO) -> "CarefulVideoIO":
        asked = media_io.num_frames
        num_frames = asked if 0 < asked < MOST_FRAMES else MOST_FRAMES
        made = cls(Frame.like(media_io.image_io), num_frames, **media_io.kwargs)
        # vLLM's uniform one is used unless the user has chosen another.
        is_default = type(media_io.video_loader) is VideoBackend
        made.video_loader = EvenFrames() if is_default else media_io.video_loader
        return made

    def get_max_bytes(self) -> int:
        return MOST_BYTES

    def load_base64(self, media_type: str, data: str) -> Any:
        VIDEO.check_type(media_type)
        if media_type.lower() != "video/jpeg":
            return super().load_base64(media_type, data)
        VIDEO.check_size(len(data) * 3 // 4)
        if (count := data.count(",") + 1) > self.num_frames:
            raise VIDEO.refused(
                f"A video of single JPEGs may have at most {self.num_frames} frames, got {count}. "
                f"Leave some out."
            )
        with VIDEO.decoding():
            return super().load_base64(media_type, data)

    def load_file(self, filepath: Path) -> Any:
        VIDEO.check_file(filepath)
        return super().load_file(filepath)

    def load_bytes(self, data: bytes) -> Any:
        VIDEO.check_size(len(data))
        if not _holds_its_pictures(data):
            raise VIDEO.refused(
                "A video must be an MP4, MOV, WebM, Matroska or AVI file, got another format. "
                "Convert it, or send its frames as data:video/jpeg;base64,… with a comma between "
                "two."
            )
        with VIDEO.decoding():
            return super().load_bytes(data)


def _holds_its_pictures(data: bytes) -> bool:
    return (
        data[4:8] == b"ftyp"  # MP4, MOV
        or data[:4] == b"\x1a\x45\xdf\xa3"  # WebM, Matroska
        or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")
    )


class EvenFrames(VideoBackend):
    """vLLM's decoder of files, for the frames that transformers' processor takes of a video."""

    @classmethod
    def compute_frames_index_to_sample(
        cls, source: VideoSourceMetadata, target: VideoTargetMetadata, **_: Any
    ) -> list[int]:
        total = source.total_frames_num
        if not 0 < total <= MOST_FILE_FRAMES:
            raise VIDEO.refused(
                f"A video's file must have 1 to {MOST_FILE_FRAMES} frames, got {total}. Send a "
                f"whole one, a part of it, or one with fewer frames a second."
            )
        count = min(target.num_frames, total)
        if target.fps > 0:
            count = min(count, max(1, int(source.duration * target.fps)))
        return even_indices(total, count)

    @classmethod
    def read_frames(
        cls, cap: Any, frame_idx: list[int], total_frames_num: int, **options: Any
    ) -> tuple[np.ndarray, list[int]]:
        """Raises VLLMValidationError when frames are too large, or more than one of them is
        damaged. A file's header may count a frame that is none."""
        width, height = (
            int(cap.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        )
        if width * height > MOST_FRAME_PIXELS:
            raise VIDEO.refused(
                f"A video's frames may have at most {MOST_FRAME_PIXELS} pixels, got {width} x "
                f"{height}. Send a smaller one: the model sees them much smaller anyway."
            )
        frames, found = super().read_frames(cap, frame_idx, total_frames_num, **options)
        if not found or len(found) < len(frame_idx) - 1:
            raise VIDEO.refused(
                f"The video cannot be read: {len(frame_idx)} frames of it were to be seen, and "
                f"{len(found)} can be. Send {VIDEO.whole}."
            )
        return frames, found
