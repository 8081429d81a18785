"""How images become part of a prompt: patches for the vision tower, and a run of image tokens.

Patches are made by transformers' image processor for Pillow. The processor that a checkpoint names
needs torchvision, which a CPU install does not have. The prompt says `<|image|>` once per image;
here that becomes a begin mark, as many image tokens as the tower has rows for it, and an end mark.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from transformers import BatchFeature, DiffusionGemmaConfig, PretrainedConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import BaseDummyInputsBuilder
from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.multimodal.processing.processor import (
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from vllm_dllm.compat.media_processor import ProcessorHooks
from vllm_dllm.requests.images import (
    MOST_IMAGES,
    check_media,
    check_options,
    check_size,
)

logger = init_logger(__name__)

IMAGE = "<|image|>"


class ImageProcessingInfo(BaseProcessingInfo):
    """What vLLM asks about a checkpoint's images, before it sees any."""

    def get_hf_config(self) -> DiffusionGemmaConfig:
        return self.ctx.get_hf_config(DiffusionGemmaConfig)

    @cached_property
    def image_processor(self) -> Gemma4ImageProcessorPil | None:
        """None where the checkpoint cannot see."""
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
        processor = _load(model_config.model, model_config.revision, most_tokens)
        if processor is not None:
            _check_fit(processor, self.get_hf_config().vision_config)
        return processor

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        if self.image_processor is None:
            return {}
        is_limited = "image" in self.ctx.get_mm_config().limit_per_prompt
        return {"image": None if is_limited else MOST_IMAGES}

    def validate_num_items(self, modality: str, num_items: int) -> None:
        check_media(modality, num_items, self.allowed_mm_limits.get("image"))

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        return {}  # of requests

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        if self.image_processor is None:
            return {}  # asked of a server that takes a cache from another one, too
        return {"image": self.image_processor.max_soft_tokens}


@lru_cache(maxsize=4)
def _load(
    model: str, revision: str | None, most_tokens: int | None
) -> Gemma4ImageProcessorPil | None:
    options: dict[str, Any] = {"revision": revision or "main"}
    if most_tokens is not None:
        options["max_soft_tokens"] = most_tokens
    try:
        return Gemma4ImageProcessorPil.from_pretrained(model, **options)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        # No warning: a model of text has a vision_config, too, which transformers makes up.
        logger.info("Images are refused, text alone is served: no image processor (%s)", reason)
        return None


def _check_fit(processor: Gemma4ImageProcessorPil, tower: PretrainedConfig) -> None:
    """Raises ValueError when there are images that the tower could not take."""
    names = ("patch_size", "pooling_kernel_size")
    found, expected = ([getattr(one, name) for name in names] for one in (processor, tower))
    # The longest image is one row of image tokens.
    longest = processor.max_soft_tokens * processor.pooling_kernel_size
    if found != expected or longest > tower.position_embedding_size:
        raise ValueError(
            f"The image processor's settings must fit the vision tower: patch_size and "
            f"pooling_kernel_size {expected} and at most {tower.position_embedding_size} patches "
            f"in a row, got {found} and {longest}. Copy processor_config.json and config.json from "
            f"one checkpoint."
        )


class ImageDummyInputs(BaseDummyInputsBuilder[ImageProcessingInfo]):
    """The largest input that memory is planned for."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return IMAGE * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: MultiModalDummyOptions,
    ) -> MultiModalDataDict:
        processor = self.info.image_processor
        if processor is None:
            return {}
        # A strip of square units, one per image token: no other shape fills the budget exactly.
        unit = processor.patch_size * processor.pooling_kernel_size
        images = self._get_dummy_images(
            width=unit * processor.max_soft_tokens,
            height=unit,
            num_images=mm_counts.get("image", 0),
        )
        return {"image": images}


class ImageProcessor(ProcessorHooks[ImageProcessingInfo]):
    """Makes patches of a request's images, and room for them in its prompt."""

    def process(self, items: MultiModalDataItems, options: Mapping[str, object]) -> BatchFeature:
        check_options(options)
        given = items.get_items("image", ImageProcessorItems) if items else ()
        if not given:
            return BatchFeature()
        processor = self.info.image_processor
        assert processor is not None
        if not processor.do_resize:
            unit = processor.patch_size * processor.pooling_kernel_size
            for i in range(len(given)):
                size = given.get_image_size(i)
                check_size(size.width, size.height, unit, processor.max_soft_tokens)
        made = processor(given.get_all(), return_tensors="pt")
        return BatchFeature(
            {
                "patches": made["pixel_values"],
                "patch_positions": made["image_position_ids"],
                "num_image_tokens": made["num_soft_tokens_per_image"],
            }
        )

    def fields(self) -> Mapping[str, MultiModalFieldConfig]:
        return {
            "patches": MultiModalFieldConfig.batched("image"),
            "patch_positions": MultiModalFieldConfig.batched("image"),
            "num_image_tokens": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def prompt_updates(self, processed: MultiModalKwargsItems) -> Sequence[PromptUpdate]:
        config = self.info.get_hf_config()

        def image_tokens(index: int) -> PromptUpdateDetails:
            count = int(processed["image"][index]["num_image_tokens"].data)
            image = [config.image_token_id] * count
            tokens = [config.boi_token_id, *image, config.eoi_token_id]
            return PromptUpdateDetails.select_token_id(tokens, config.image_token_id)

        target = [config.image_token_id]
        return [PromptReplacement(modality="image", target=target, replacement=image_tokens)]
