"""A video as timed frames: by a checkpoint's settings, in the words of transformers' processor."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import MultiModalDataParser

from checkpoints.recipes.tokenizer import BOI_ID, EOI_ID, VIDEO_ID
from tests.paths import CHECKPOINTS
from vllm_dllm.models import vision
from vllm_dllm.requests.media import check_media_count

IMAGES = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 280}


def write(folder: Path, **files: dict[str, Any]) -> str:
    for name, contents in files.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))
    return str(folder)


def test_settings_of_a_video_processor(tmp_path: Path) -> None:
    """The published layout: one file for all processors of a checkpoint."""
    both = {"image_processor": IMAGES, "video_processor": {"patch_size": 4, "num_frames": 8}}
    found = vision.load_frame_processor(write(tmp_path, processor_config=both), None)
    assert (found.patch_size, found.num_frames, found.max_soft_tokens) == (4, 8, 70)
    more = write(tmp_path, processor_config=both | {"video_processor": {"max_soft_tokens": 140}})
    vision.load_frame_processor.cache_clear()
    found = vision.load_frame_processor(more, None)
    assert (found.num_frames, found.max_soft_tokens) == (32, 140)


def items(*videos: tuple[np.ndarray, dict[str, Any]]) -> Any:
    return MultiModalDataParser(video_needs_metadata=True).parse_mm_data({"video": list(videos)})[
        "video"
    ]


def frames(count: int, height: int, width: int) -> np.ndarray:
    shape = (count, height, width, 3)
    return np.random.default_rng(count).integers(256, size=shape, dtype=np.uint8)


def test_each_frame_is_a_small_image(tmp_path: Path) -> None:
    processor = vision.load_frame_processor(
        write(tmp_path, processor_config={"video_processor": IMAGES}), None
    )
    one, other = frames(2, 30, 40), frames(40, 20, 9)
    made = vision.make_patches(
        items((one, {"fps": 0.5}), (other, {"fps": 10.0})), processor, lambda width, height: None
    )
    kept = [i * 40 // 32 for i in range(32)]
    for video, start, count in ((one, 0, 2), (other[kept], 2, 32)):
        alone = processor([Image.fromarray(frame) for frame in video], return_tensors="pt")
        mine = slice(start, start + count)
        assert torch.equal(made["frame_patches"][mine], alone["pixel_values"])
        assert torch.equal(made["frame_positions"][mine], alone["image_position_ids"])
    assert made["frame_seconds"].tolist() == [0, 2, *(i / 10 for i in kept)]
    assert made["num_frames"].tolist() == [2, 32]
    as_images = vision.as_images(made)
    assert as_images["num_image_tokens"].tolist() == [
        2 * made["num_frame_tokens"][0].item(),
        32 * made["num_frame_tokens"][1].item(),
    ]


def test_words_between_frames() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "diffusiongemma-tiny-vision")
    video: Any = {
        "num_frame_tokens": SimpleNamespace(data=torch.tensor(2)),
        "frame_seconds": SimpleNamespace(data=torch.tensor([0.0, 61.9, 3600.0])),
    }
    tokens = vision.prompt_tokens(video, tokenizer.encode, BOI_ID, VIDEO_ID, EOI_ID)
    frame = "<|image><|video|><|video|><image|>"
    assert tokenizer.decode(tokens) == f"00:00 {frame} 01:01 {frame} 60:00 {frame}"
    assert tokens == tokenizer.encode(f"00:00 {frame} 01:01 {frame} 60:00 {frame}")


@pytest.mark.parametrize(
    ("kind", "count", "most", "complaint"),
    [
        ("video", 1, {}, "reads text only"),
        ("video", 1, {"image": 16}, r"tokenizer has no token <\|video\|>"),
        ("video", 3, {"image": 16, "video": 2}, "at most 2 videos .* got 3"),
        ("image", 17, {"image": 16}, "at most 16 images .* got 17"),
        ("audio", 1, {"image": 16, "video": 2}, r"text, images and videos, got 1 audio\(s\)"),
    ],
)
def test_more_than_a_prompt_may_hold(
    kind: str, count: int, most: dict[str, int], complaint: str
) -> None:
    with pytest.raises(VLLMValidationError, match=complaint):
        check_media_count(kind, count, most)
