"""Runs images through a checkpoint's vision tower, to rows as wide as token embeddings. Makes small
images of a video's frames, each behind its time.

Tower and projection are transformers' own modules: they are small beside the text layers, run once
per image, and so compute what the reference computes. Only the tower's MLPs are run by ours, to the
same bits.

Videos follow transformers' `Gemma4VideoProcessor` and `Gemma4Processor.replace_video_token`
(`models/gemma4` in transformers): at most 32 frames of at most 70 tokens, unless the checkpoint
says otherwise, and `00:07 ` before the begin mark of a frame shown at second 7.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import AutoModel, DiffusionGemmaConfig
from transformers.initialization import no_init_weights
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaMultimodalEmbedder,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionMLP
from transformers.video_processing_utils import BaseVideoProcessor
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem
from vllm.multimodal.parse import VideoProcessorItems

from vllm_dllm.requests.media import MAX_FRAMES, format_timestamp, sample_frames


class InPlaceMLP(Gemma4VisionMLP):
    """transformers' MLP, which writes its widest product over the first factor. On CPUs a new
    tensor of that size comes from the kernel, page by page, which takes 5% of the tower's time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).mul_(self.up_proj(x)))


def build_tower(config: DiffusionGemmaConfig, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Returns the vision tower and the projection behind it, without their weights."""
    with no_init_weights():
        tower = AutoModel.from_config(config.vision_config, dtype=dtype)
        projection = DiffusionGemmaMultimodalEmbedder(config.vision_config, config.text_config)
    for module in tower.modules():
        if isinstance(module, Gemma4VisionMLP):
            module.__class__ = InPlaceMLP
    return tower.eval(), projection.to(dtype).eval()


def encode_images(
    tower: nn.Module,
    projection: nn.Module,
    patches: torch.Tensor,  # [n, P, 3 * patch_size ** 2], zeros behind an image's last patch
    positions: torch.Tensor,  # [n, P, 2] int64, x and y of each patch; -1 behind the last
    num_tokens: Sequence[int],  # [n] soft tokens of each image
) -> list[torch.Tensor]:
    """Returns the embeddings of each image, [num_tokens[i], H]. The tower drops the padding and
    returns the tokens of all images in one tensor, so `num_tokens` must be those of the patches."""
    states = tower(pixel_values=patches, pixel_position_ids=positions).last_hidden_state
    return list(projection(states).split(list(num_tokens)))


# Of transformers' `Gemma4VideoProcessor`, which cannot be imported without torchvision.
_DEFAULTS = {"max_soft_tokens": 70, "num_frames": MAX_FRAMES}


@lru_cache(maxsize=4)
def load_frame_processor(model: str, revision: str | None) -> Gemma4ImageProcessorPil:
    """Returns the processor that makes patches of frames, with the settings of the checkpoint's
    video processor. Its `num_frames` is the most frames of a video. Raises OSError if the settings
    cannot be read. Cached: all callers share the object, so do not change it."""
    # vLLM's None means the default branch, whose name transformers expects.
    written, _ = BaseVideoProcessor.get_video_processor_dict(model, revision=revision or "main")
    return Gemma4ImageProcessorPil(**(_DEFAULTS | written))


def make_patches(
    videos: VideoProcessorItems,
    processor: Gemma4ImageProcessorPil,
    check_size: Callable[[int, int], None],  # of a frame, width and height
) -> dict[str, torch.Tensor]:
    """Returns the tensors of n videos by name. Tensors of frames hold the frames of all videos in
    order. Raises what `check_size` does for a frame of a wrong size."""
    patches, positions, seconds, num_frames, num_tokens = [], [], [], [], []
    for frames, metadata in videos.get_all():
        seen, times = sample_frames(frames, metadata, processor.num_frames)
        height, width = seen.shape[1:3]
        check_size(width, height)
        for frame in seen:  # one by one: the processor copies what it gets, and frames are large
            made = processor([Image.fromarray(frame)], return_tensors="pt")
            patches.append(made["pixel_values"])
            positions.append(made["image_position_ids"])
        seconds.append(torch.tensor(times, dtype=torch.float64))
        num_frames.append(len(seen))
        num_tokens.append(int(made["num_soft_tokens_per_image"][0]))
    return {
        "frame_patches": torch.cat(patches),
        "frame_positions": torch.cat(positions),
        "frame_seconds": torch.cat(seconds),
        "num_frames": torch.tensor(num_frames),
        "num_frame_tokens": torch.tensor(num_tokens),
    }


def field_configs(num_frames: torch.Tensor) -> dict[str, MultiModalFieldConfig]:
    """Returns how the tensors of `make_patches` are split by video."""
    flat, batched = MultiModalFieldConfig.flat_from_sizes, MultiModalFieldConfig.batched
    return {
        "frame_patches": flat("video", num_frames),
        "frame_positions": flat("video", num_frames),
        "frame_seconds": flat("video", num_frames, keep_on_cpu=True),
        "num_frames": batched("video", keep_on_cpu=True),
        "num_frame_tokens": batched("video", keep_on_cpu=True),
    }


def prompt_tokens(
    video: MultiModalKwargsItem,
    encode: Callable[[str], Sequence[int]],
    begin: int,
    frame_token: int,
    end: int,
) -> list[int]:
    """Returns the tokens that replace one video in a prompt: for each frame its time, the `begin`
    mark, the frame's tokens and the `end` mark. `encode`: the tokenizer's, without special
    tokens."""
    frame = [begin, *[frame_token] * int(video["num_frame_tokens"].data), end]
    times = map(format_timestamp, video["frame_seconds"].data.tolist())
    return list(
        chain.from_iterable(
            [*encode(f" {time} " if i else f"{time} "), *frame] for i, time in enumerate(times)
        )
    )


def as_images(videos: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of `make_patches` under the names that the tensors of images have."""
    return {
        "patches": videos["frame_patches"],
        "patch_positions": videos["frame_positions"],
        "num_image_tokens": videos["num_frames"] * videos["num_frame_tokens"],
    }
