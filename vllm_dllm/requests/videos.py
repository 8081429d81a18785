"""Which frames of a video a model sees, and what a prompt says of their time.

As transformers' `Gemma4VideoProcessor` and `Gemma4Processor.replace_video_token` do it
(`models/gemma4` in transformers).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError

MOST_FRAMES = 32
"""transformers' `num_frames`, where a checkpoint does not say another one."""
_FPS = 24.0  # transformers', of a video that does not say how many frames it shows a second


def even_indices(total: int, count: int) -> list[int]:
    """`count` of `total` frames, as transformers' `default_sample_indices_fn` takes them."""
    return [i * total // count for i in range(count)]


def seen_frames(
    frames: Any,  # [n, height, width, 3] uint8
    metadata: Mapping[str, Any],
    most: int,
) -> tuple[np.ndarray, list[float]]:
    """Returns at most `most` frames, and the second that each is shown at.

    Raises:
        VLLMValidationError: when this is no video, or `metadata` are not those of its frames.
    """
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
    kept = even_indices(len(frames), min(most, len(frames)))
    fps = metadata.get("fps") or _FPS
    fps = fps if fps > 0 else _FPS  # damaged files say anything
    return frames[kept], [indices[i] / fps for i in kept]


def timestamp(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
