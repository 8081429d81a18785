"""How many images and videos, of what size, and what else beside text, a prompt may hold.

All functions raise VLLMValidationError, which becomes HTTP 400.
"""

from collections.abc import Mapping

from vllm.exceptions import VLLMValidationError

MOST: Mapping[str, int] = {"image": 16, "video": 2}
"""Per prompt, unless --limit-mm-per-prompt says otherwise: a server keeps them all in memory. Two
videos of 32 frames have as many image tokens as 16 images."""


def check_media(modality: str, count: int, most: Mapping[str, int]) -> None:
    """Checks one kind: image, video, audio. `most`: of each kind that the model takes on this
    server, empty where the checkpoint reads text."""
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
