"""vLLM's processor of images and other media, with its steps open to a subclass."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.processing.processor import BaseMultiModalProcessor, PromptUpdate

Info = TypeVar("Info", bound=BaseProcessingInfo)


class ProcessorHooks(BaseMultiModalProcessor[Info], Generic[Info]):
    """vLLM's processor of media, with its steps open to a subclass.

    Media are cached by their content. vLLM would cache them by an id that the client chooses, and
    so mix up images of different clients.
    """

    @abstractmethod
    def process(self, items: MultiModalDataItems, options: Mapping[str, object]) -> BatchFeature:
        """Returns the tensors of `items`, named as in `fields`. `options`: the request's keyword
        arguments for the processor."""

    @abstractmethod
    def fields(self, made: BatchFeature) -> Mapping[str, MultiModalFieldConfig]:
        """Returns how each tensor of `made`, which `process` returned, is split into items."""

    @abstractmethod
    def prompt_updates(self, processed: MultiModalKwargsItems) -> Sequence[PromptUpdate]:
        """Returns how the prompt changes. `processed`: the tensors of each item, by modality."""

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        return self.process(mm_items, hf_kwargs)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return self.fields(hf_inputs)

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        return self.prompt_updates(out_mm_kwargs)

    def _matched_updates_from_result(self, mm_prompt_updates: Any, match_result: Any) -> Any:
        """Returns what vLLM returns. Raises ValueError, which becomes HTTP 400, if an item has no
        place in the prompt: vLLM would fail with an assertion."""
        for modality, found in match_result.items():
            if None in found:
                raise ValueError(
                    f"the prompt has no place for {modality} {found.index(None) + 1} of "
                    f"{len(found)}. Write a place for each, or leave out truncate_prompt_tokens, "
                    f"which cuts places off."
                )
        return super()._matched_updates_from_result(mm_prompt_updates, match_result)

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> Mapping[str, list[str]]:
        """Returns hashes of the media's content by modality, without the client's own ids."""
        return super()._get_mm_hashes(replace(inputs, mm_uuid_items=None))
