"""How many images, of what size, and what else beside text, a prompt may hold.

All functions raise VLLMValidationError, which becomes HTTP 400.
"""

from collections.abc import Mapping

from vllm.exceptions import VLLMValidationError

MOST_IMAGES = 16
"""Per prompt, unless --limit-mm-per-prompt says otherwise: a server keeps them all in memory."""


def check_media(modality: str, count: int, most_images: int | None) -> None:
    """Checks one kind: image, video, audio. `most_images`: None where the checkpoint reads text."""
    if most_images is None:
        raise VLLMValidationError(
            f"This checkpoint reads text only, got {count} {modality}(s): it has no vision tower, "
            f"or no settings of an image processor. Send text.",
            parameter=modality,
        )
    if modality != "image":
        raise VLLMValidationError(
            f"This model reads text and images, got {count} {modality}(s). Send text, or single "
            f"pictures as images.",
            parameter=modality,
        )
    if count > most_images:
        raise VLLMValidationError(
            f"A prompt may have at most {most_images} images on this server, got {count}. Send "
            f"fewer, or start the server with a higher --limit-mm-per-prompt.",
            parameter="image",
        )


def check_size(width: int, height: int, unit: int, most_tokens: int) -> None:
    """Checks the size of an image, in pixels, that is not scaled: `unit` x `unit` pixels become a
    token."""
    if width % unit or height % unit or width * height > most_tokens * unit**2:
        raise VLLMValidationError(
            f"This checkpoint takes images as they are: both sides must be multiples of {unit} "
            f"pixels, with at most {most_tokens * unit**2} pixels in all, got {width} x {height}. "
            f"Scale or crop the image.",
            parameter="image",
        )


def check_options(options: Mapping[str, object]) -> None:
    """A request's own settings of the image processor."""
    if options:
        raise VLLMValidationError(
            f"mm_processor_kwargs are a setting of the server for this model, got "
            f"{sorted(options)} in a request. Leave them out.",
            parameter="mm_processor_kwargs",
        )
