"""What a checkpoint's settings say of images and videos, before any is sent."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.multimodal import ImageDummyOptions

from tests.engine.images import random_video
from vllm_dllm.models.image_processor import VIDEO, ImageProcessingInfo

SETTINGS = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
TOWER = SimpleNamespace(patch_size=4, pooling_kernel_size=2, position_embedding_size=140)


def info(folder: Path, processors: dict[str, Any], **kwargs: Any) -> ImageProcessingInfo:
    """A checkpoint with settings of `processors`; `kwargs`: the server's mm_processor_kwargs."""
    (folder / "processor_config.json").write_text(json.dumps(processors))
    context = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            get_multimodal_config=lambda: SimpleNamespace(enable_mm_embeds=False),
        ),
        tokenizer=SimpleNamespace(get_vocab=lambda: {VIDEO: 7}),
        get_hf_config=lambda expected: SimpleNamespace(vision_config=TOWER),
        get_merged_mm_kwargs=lambda more: kwargs | more,
        limits={},
    )
    context.get_mm_config = lambda: SimpleNamespace(limit_per_prompt=context.limits)
    return ImageProcessingInfo(context)


@pytest.mark.parametrize(
    ("kind", "wrong", "found"),
    [
        ("image", {"patch_size": 8}, r"\[4, 2\] and at most 140 .* got \[8, 2\] and 140\."),
        ("image", {"max_soft_tokens": 280}, r"140 patches in a row, got \[4, 2\] and 560\."),
        ("video", {"pooling_kernel_size": 1}, r"got \[4, 1\] and 70\. Copy processor_config"),
    ],
)
def test_settings_that_do_not_fit_the_vision_tower(
    tmp_path: Path, kind: str, wrong: dict[str, int], found: str
) -> None:
    processors = {"image_processor": SETTINGS, "video_processor": SETTINGS}
    processors[f"{kind}_processor"] = SETTINGS | wrong
    seen = info(tmp_path, processors)
    with pytest.raises(ValueError, match=f"The {kind} processor's settings must fit .*{found}"):
        _ = seen.image_processor, seen.frame_processor


def test_an_option_that_no_request_may_set(tmp_path: Path) -> None:
    seen = info(tmp_path, {"image_processor": SETTINGS}, max_soft_tokens=35, do_resize=False)
    with pytest.raises(ValueError, match=r"may set max_soft_tokens only, got \['do_resize'\]"):
        _ = seen.image_processor


def test_limits(tmp_path: Path) -> None:
    seen = info(tmp_path, {"image_processor": SETTINGS, "video_processor": SETTINGS})
    assert seen.get_supported_mm_limits() == {"image": 16, "video": 2}
    assert seen.most_tokens_in_one_piece == 72
    seen.ctx.limits["image"] = ImageDummyOptions(count=0)
    assert seen.get_supported_mm_limits() == {"image": None}, "told to take text only"


def test_a_video_says_when_its_frames_are_shown(tmp_path: Path) -> None:
    parser = info(tmp_path, {}).get_data_parser()
    frames, metadata = random_video(3, (64, 64), seed=1)
    assert len(parser.parse_mm_data({"video": [(frames, metadata)]})["video"]) == 1
    with pytest.raises(ValueError, match="metadata"):
        parser.parse_mm_data({"video": [frames]})
