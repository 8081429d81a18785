"""Images and videos: what a checkpoint's settings say of them before any is sent, a video as timed
frames in the words of transformers' processor, and a vision tower that computes what transformers'
does, to the bit."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, DiffusionGemmaConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionMLP
from vllm.config.multimodal import ImageDummyOptions
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import MultiModalDataParser

from bench.images_shape import LAYERS, TOWER
from checkpoints.recipes.architecture import build_config
from checkpoints.recipes.tokenizer import BOI_ID, EOI_ID, VIDEO_ID
from tests.engine.images import random_video
from tests.paths import CHECKPOINTS
from vllm_dllm.models import vision
from vllm_dllm.models.image_processor import VIDEO, ImageProcessingInfo
from vllm_dllm.requests.media import check_media_count

SETTINGS = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
SMALL_TOWER = SimpleNamespace(patch_size=4, pooling_kernel_size=2, position_embedding_size=140)


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
        get_hf_config=lambda expected: SimpleNamespace(vision_config=SMALL_TOWER),
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


def config() -> DiffusionGemmaConfig:
    return build_config(
        vocab_size=512,
        canvas_length=64,
        max_position_embeddings=512,
        dtype="float32",
        vision_config={**TOWER, "num_hidden_layers": 2},
        sees=True,
        **LAYERS,
    )


def with_transformers_mlps(tower: torch.nn.Module) -> torch.nn.Module:
    theirs = copy.deepcopy(tower)
    for module in theirs.modules():
        if isinstance(module, vision.InPlaceMLP):
            module.__class__ = Gemma4VisionMLP
    return theirs


@torch.inference_mode()
def test_same_bits() -> None:
    tower, _ = vision.build_tower(config(), torch.float32)
    draws = torch.Generator().manual_seed(0)
    for parameter in tower.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draws) / parameter.shape[-1] ** 0.5)
    assert sum(isinstance(module, vision.InPlaceMLP) for module in tower.modules()) == 2
    patches = torch.rand(1, 54, 768, generator=draws)
    positions = torch.tensor([[[x, y] for y in range(6) for x in range(9)]])
    asked = {"pixel_values": patches, "pixel_position_ids": positions}
    ours, theirs = tower(**asked), with_transformers_mlps(tower)(**asked)
    assert ours.last_hidden_state.isfinite().all()
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
