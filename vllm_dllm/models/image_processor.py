"""Makes images and videos part of a prompt: patches for the vision tower, and runs of tokens.

Patches are made by transformers' image processor for Pillow. The processors that a checkpoint names
need torchvision, which a CPU install does not have. The prompt says `<|image|>` once per image;
here that becomes a begin mark, as many image tokens as the tower has rows for it, and an end mark.
`<|video|>` becomes such a run for each frame, behind the time it is shown at (`vision.py`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

from transformers import BatchFeature, DiffusionGemmaConfig, PretrainedConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import (
    ImageProcessorItems,
    MultiModalDataItems,
    MultiModalDataParser,
    VideoProcessorItems,
)
from vllm.multimodal.processing import BaseDummyInputsBuilder
from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.multimodal.processing.processor import (
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from vllm_dllm.compat.media_processor import ProcessorHooks
from vllm_dllm.models import vision
from vllm_dllm.requests import media

logger = init_logger(__name__)

IMAGE, VIDEO = "<|image|>", "<|video|>"


class ImageProcessingInfo(BaseProcessingInfo):
    """Answers vLLM's questions about a checkpoint's images and videos, before any is sent."""

    def get_hf_config(self) -> DiffusionGemmaConfig:
        return self.ctx.get_hf_config(DiffusionGemmaConfig)

    @cached_property
    def image_processor(self) -> Gemma4ImageProcessorPil | None:
        """Returns the processor that makes patches of images. Returns None for a model without
        vision, or if no processor can be loaded. Raises ValueError if --mm-processor-kwargs has
        another option than `max_soft_tokens`, or the processor does not fit the vision tower."""
        if self.get_hf_config().vision_config is None:
            return None
        model_config = self.ctx.model_config
        options = self.ctx.get_merged_mm_kwargs({})
        most_tokens = options.pop("max_soft_tokens", None)
        if options:
            raise ValueError(
                f"--mm-processor-kwargs may set max_soft_tokens only, got {sorted(options)}. Leave "
                f"the others out."
            )
        processor = _load_image_processor(model_config.model, model_config.revision, most_tokens)
        if processor is not None:
            _check_fits_tower("image", processor, self.get_hf_config().vision_config)
        return processor

    @cached_property
    def frame_processor(self) -> Gemma4ImageProcessorPil:
        """Returns the processor that makes patches of videos' frames, for a checkpoint that has an
        `image_processor`. Raises ValueError if it does not fit the vision tower."""
        model_config = self.ctx.model_config
        processor = vision.load_frame_processor(model_config.model, model_config.revision)
        _check_fits_tower("video", processor, self.get_hf_config().vision_config)
        return processor

    @cached_property
    def video_token_id(self) -> int | None:
        """Returns the token of a video's frames; None if there is no tokenizer or no such token."""
        tokenizer = self.ctx.tokenizer
        return None if tokenizer is None else tokenizer.get_vocab().get(VIDEO)

    @property
    def most_tokens_in_one_piece(self) -> int:
        """Returns how many tokens the longest image or frame has, with the marks around it."""
        assert self.image_processor is not None
        processors = (self.image_processor, self.frame_processor)
        return 2 + max(processor.max_soft_tokens for processor in processors)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Returns how many images and videos a prompt may have: `MAX_ITEMS`, or None (no limit of
        the model's) for a kind that `--limit-mm-per-prompt` limits. Kinds that cannot be served are
        left out: both without an image processor; videos without their token, or if the server
        takes no images and says nothing of videos."""
        if self.image_processor is None:
            return {}
        limits = self.ctx.get_mm_config().limit_per_prompt
        kinds = ["image"]
        # A server told to take no images, and nothing of videos, takes text only.
        wants_text = "image" in limits and limits["image"].count == 0 and "video" not in limits
        if self.video_token_id is not None and not wants_text:
            kinds.append("video")
        return {kind: None if kind in limits else media.MAX_ITEMS[kind] for kind in kinds}

    def validate_num_items(self, modality: str, num_items: int) -> None:
        media.check_media_count(modality, num_items, self.allowed_mm_limits)

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        return {}  # of requests

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Returns the most tokens of an image and of a video, without marks and times."""
        if self.image_processor is None:
            return {}  # asked of a server that takes a cache from another one, too
        frames = self.frame_processor
        return {
            "image": self.image_processor.max_soft_tokens,
            "video": frames.num_frames * frames.max_soft_tokens,
        }

    def get_data_parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(
            expected_hidden_size=self._get_expected_hidden_size(), video_needs_metadata=True
        )


@lru_cache(maxsize=4)
def _load_image_processor(
    model: str, revision: str | None, most_tokens: int | None
) -> Gemma4ImageProcessorPil | None:
    """Returns the image processor of the checkpoint `model` (a folder or a name on the hub), with
    `most_tokens` tokens an image at most; None: as the checkpoint says. Returns None, with a line
    in the log, if none can be read. Cached: all callers share the object, so do not change it."""
    # vLLM's None means the default branch, whose name transformers expects.
    options: dict[str, Any] = {"revision": revision or "main"}
    if most_tokens is not None:
        options["max_soft_tokens"] = most_tokens
    try:
        return Gemma4ImageProcessorPil.from_pretrained(model, **options)
    except OSError as error:
        reason = str(error).partition(". ")[0]  # what follows is advice for the hub
        # No warning: a model of text has a vision_config, too, which transformers makes up.
        logger.info("Images are refused, and only text is served: no image processor (%s)", reason)
        return None


def _check_fits_tower(
    kind: str,  # "image" or "video", of what the processor is for
    processor: Gemma4ImageProcessorPil,
    tower: PretrainedConfig,
) -> None:
    """Raises ValueError if the processor may make patches that the tower cannot take."""
    names = ("patch_size", "pooling_kernel_size")
    found, expected = ([getattr(one, name) for name in names] for one in (processor, tower))
    # The longest image is one row of image tokens.
    longest = processor.max_soft_tokens * processor.pooling_kernel_size
    if found != expected or longest > tower.position_embedding_size:
        raise ValueError(
            f"The {kind} processor's settings must fit the vision tower: patch_size and "
            f"pooling_kernel_size {expected} and at most {tower.position_embedding_size} patches "
            f"in a row, got {found} and {longest}. Copy processor_config.json and config.json from "
            f"one checkpoint, or lower max_soft_tokens in --mm-processor-kwargs."
        )


class ImageDummyInputs(BaseDummyInputsBuilder[ImageProcessingInfo]):
    """Makes the largest inputs, by which vLLM plans memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return IMAGE * mm_counts.get("image", 0) + VIDEO * mm_counts.get("video", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        """Returns the largest images and videos of a prompt."""
        if self.info.image_processor is None:
            return {}
        frames = self.info.frame_processor
        images = self._get_dummy_images(
            **_largest_size(self.info.image_processor), num_images=mm_counts.get("image", 0)
        )
        videos = self._get_dummy_videos(
            **_largest_size(frames),
            num_frames=frames.num_frames,
            num_videos=mm_counts.get("video", 0),
        )
        return {"image": images, "video": [(video, {}) for video in videos]}


def _largest_size(processor: Gemma4ImageProcessorPil) -> dict[str, int]:
    """Returns width and height, in pixels, of the image with most tokens. It is a strip of squares,
    one for each token, because no other shape fills the budget exactly."""
    unit = _pixels_a_token(processor)
    return {"width": unit * processor.max_soft_tokens, "height": unit}


def _pixels_a_token(processor: Gemma4ImageProcessorPil) -> int:
    """Returns the side of the square that becomes one image token, in pixels."""
    return processor.patch_size * processor.pooling_kernel_size


class ImageProcessor(ProcessorHooks[ImageProcessingInfo]):
    """Makes patches of a request's images and videos, and puts their tokens into its prompt."""

    def process(self, items: MultiModalDataItems, options: Mapping[str, object]) -> BatchFeature:
        """Returns the vision tower's inputs, made of a prompt's images and videos. Raises
        VLLMValidationError if the request has processor options of its own, or an image has a wrong
        size or values that are not colours."""
        media.check_no_processor_options(options)
        made: dict[str, Any] = {}
        counts = items.get_all_counts()  # 0 of a kind in what vLLM warms up with
        if counts.get("image"):
            processor = self.info.image_processor
            assert processor is not None
            images = items.get_items("image", ImageProcessorItems)
            for i in range(0 if processor.do_resize else len(images)):
                _check_size(processor, *images.get_image_size(i))
            pictures = processor(images.get_all(), return_tensors="pt")
            made |= {
                "patches": media.check_pixels(pictures["pixel_values"]),
                "patch_positions": pictures["image_position_ids"],
                "num_image_tokens": pictures["num_soft_tokens_per_image"],
            }
        if counts.get("video"):
            processor = self.info.frame_processor
            videos = items.get_items("video", VideoProcessorItems)
            made |= vision.make_patches(videos, processor, partial(_check_size, processor))
        return BatchFeature(made)

    def fields(self, made: BatchFeature) -> Mapping[str, MultiModalFieldConfig]:
        """Returns how the tensors of `process` are split by image and video."""
        images = {
            "patches": MultiModalFieldConfig.batched("image"),
            "patch_positions": MultiModalFieldConfig.batched("image"),
            "num_image_tokens": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        if "num_frames" not in made:
            return images
        return images | vision.field_configs(made["num_frames"])

    def prompt_updates(self, processed: MultiModalKwargsItems) -> Sequence[PromptUpdate]:
        """Returns which tokens replace the one token of each image or video in a prompt."""
        config, video_token_id = self.info.get_hf_config(), self.info.video_token_id

        def image_tokens(index: int) -> PromptUpdateDetails:
            """Returns the tokens that replace the image of this index: marks and image tokens."""
            count = int(processed["image"][index]["num_image_tokens"].data)
            image = [config.image_token_id] * count
            tokens = [config.boi_token_id, *image, config.eoi_token_id]
            return PromptUpdateDetails.select_token_id(tokens, config.image_token_id)

        def video_tokens(index: int) -> PromptUpdateDetails:
            """Returns the tokens that replace this video, see `vision.prompt_tokens`."""
            encode = partial(self.info.get_tokenizer().encode, add_special_tokens=False)
            tokens = vision.prompt_tokens(
                processed["video"][index],
                encode,
                config.boi_token_id,
                video_token_id,
                config.eoi_token_id,
            )
            return PromptUpdateDetails.select_token_id(tokens, video_token_id)

        updates = [
            PromptReplacement(
                modality="image", target=[config.image_token_id], replacement=image_tokens
            )
        ]
        if video_token_id is not None:
            updates.append(
                PromptReplacement(
                    modality="video", target=[video_token_id], replacement=video_tokens
                )
            )
        return updates


def _check_size(processor: Gemma4ImageProcessorPil, width: int, height: int) -> None:
    """Raises VLLMValidationError for images of a wrong size, in pixels, that are not scaled."""
    if not processor.do_resize:
        media.check_image_size(width, height, _pixels_a_token(processor), processor.max_soft_tokens)
