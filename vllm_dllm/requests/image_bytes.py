"""Bytes of images, read with care: Pillow opens a picture's header first, and what is too large or
moves is refused before it is decoded."""

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import ImageMediaIO

from vllm_dllm.requests.media_refusals import IMAGE, MOST_BYTES

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
