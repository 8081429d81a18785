"""DiffusionGemma for vLLM: one Gemma4 backbone in two modes that share all weights.

Encoder mode (prefill, commit) is causal and sees plain token embeddings; decoder mode (denoising)
is bidirectional and sees self-conditioned ones. The mode of a row is decided outside the model, by
the embeddings and attention metadata that `DiffusionModelState` prepares.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma4 import Gemma4Model
from vllm.model_executor.models.interfaces import SupportsMultiModal, SupportsQuant
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.attention import use_window_rules
from vllm_dllm.compat.concurrent_experts import allow_concurrent_experts, run_experts_beside_mlp
from vllm_dllm.compat.row_reductions import read_rows_once
from vllm_dllm.models import vision
from vllm_dllm.models.image_processor import (
    IMAGE,
    VIDEO,
    ImageDummyInputs,
    ImageProcessingInfo,
    ImageProcessor,
)
from vllm_dllm.models.vocabulary import Vocabulary, no_logits
from vllm_dllm.quantization import modelopt
from vllm_dllm.quantization.checked_weights import load_checked
from vllm_dllm.quantization.config import adapt_quant_config


class SelfConditioning(nn.Module):
    """Computes `post_norm(e + down(gelu_tanh(gate(u)) * up(u)))` with `u = pre_norm(soft)`. Source:
    transformers' `DiffusionGemmaSelfConditioning`. `post_norm` has no weight and changes embeddings
    even for a zero signal, so prefill and commit rows must not use the result."""

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = RMSNorm(hidden_size, eps=eps)
        self.post_norm = RMSNorm(hidden_size, eps=eps, has_weight=False)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(
        self,
        inputs_embeds: torch.Tensor,  # [rows, H], scaled token embeddings of the canvas
        soft_embeds: torch.Tensor,  # [rows, H], zero on a canvas' first step
    ) -> torch.Tensor:
        """Returns the conditioned embeddings [rows, H]."""
        signal = self.pre_norm(soft_embeds)
        gated = F.gelu(self.gate_proj(signal), approximate="tanh") * self.up_proj(signal)
        return self.post_norm(inputs_embeds + self.down_proj(gated))


def num_rotary_positions(vllm_config: VllmConfig) -> int:
    """Returns how many rows the tables of rotary embeddings have: the positions that a request can
    reach, and those of one more canvas, which the context's end may cut off. All 262,144 of the 26B
    model would take 400 MB in bf16."""
    model_config = vllm_config.model_config
    served = vllm_config.diffusion_config or model_config.hf_config
    reached = model_config.max_model_len + served.canvas_length
    return min(reached, model_config.hf_text_config.max_position_embeddings)


@MULTIMODAL_REGISTRY.register_processor(
    ImageProcessor, info=ImageProcessingInfo, dummy_inputs=ImageDummyInputs
)
class DiffusionGemmaForBlockDiffusion(nn.Module, Vocabulary, SupportsMultiModal, SupportsQuant):
    """The class that transformers calls `DiffusionGemmaForBlockDiffusion`, for vLLM. The vision
    tower is loaded only if the checkpoint has an image processor's settings, and
    `--limit-mm-per-prompt` allows images or videos."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.decoder.self_conditioning.": "self_conditioning.",
            "model.decoder.": "model.",
            "model.encoder.language_model.": "model.",
            "model.encoder.vision_tower.": "vision_tower.",
            "model.encoder.embed_vision.": "embed_vision.",
        }
    )
    packed_modules_mapping = {  # noqa: RUF012 (vLLM reads it as a class attribute)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    @staticmethod
    def get_model_state_cls() -> type:
        """Returns our `ModelState`, imported late because it needs the model runner."""
        from vllm_dllm.step.runner.model_state import DiffusionModelState

        return DiffusionModelState

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Builds the layers. Changes `vllm_config`: its text config and quantisation config."""
        super().__init__()
        model_config = vllm_config.model_config
        text_config = model_config.hf_text_config
        # Full-attention layers have no v_proj, keys serve as values. DiffusionGemma's config does
        # not say so; without the flag Gemma4Model would leave their value projection unset.
        text_config.attention_k_eq_v = True
        # transformers asks the outer config, and the inner one may not say so.
        text_config.tie_word_embeddings = model_config.hf_config.tie_word_embeddings
        text_config.max_position_embeddings = num_rotary_positions(vllm_config)
        self.config = text_config
        self.quant_config = vllm_config.quant_config = adapt_quant_config(
            vllm_config.quant_config, text_config
        )

        self.vision_tower: nn.Module | None = None
        self.embed_vision: nn.Module | None = None
        if model_config.supports_multimodal_inputs:
            self.vision_tower, self.embed_vision = vision.build_tower(
                model_config.hf_config, model_config.dtype
            )
        read_rows_once(vllm_config)
        at_once = allow_concurrent_experts(vllm_config)
        with use_window_rules(vllm_config.attention_config):
            self.model = Gemma4Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        if at_once:
            run_experts_beside_mlp(self.model.layers)
        self.lm_head = ParallelLMHead(
            num_embeddings=text_config.vocab_size,
            embedding_dim=text_config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if text_config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(text_config.vocab_size)
        # Set by the sampler: whether the next logits are canvases', whose vocabulary it reads.
        self.sampler_reads_hidden_states: Callable[[], bool] = lambda: False
        self.self_conditioning = SelfConditioning(
            hidden_size=text_config.hidden_size,
            intermediate_size=text_config.intermediate_size,
            eps=text_config.rms_norm_eps,
        )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str:
        """Returns the text that an image or a video has in a prompt."""
        return VIDEO if modality == "video" else IMAGE  # no other modality gets here

    def get_language_model(self) -> nn.Module:
        return self.model

    def embed_multimodal(self, **images: Any) -> list[torch.Tensor]:
        """Returns the embeddings [tokens, H] of each of n images or videos, from the tensors that
        `ImageProcessor` made of them."""
        assert self.vision_tower is not None and self.embed_vision is not None
        if "frame_patches" in images:
            images = vision.as_images(images)
        patches, patch_positions = images["patches"], images["patch_positions"]
        counts = images["num_image_tokens"].tolist()  # they stay on the host
        return vision.encode_images(
            self.vision_tower, self.embed_vision, patches, patch_positions, counts
        )

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,  # [T]
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,  # [T] bool, on the host
    ) -> torch.Tensor:
        """Returns embeddings [T, H]: those of tokens, scaled by sqrt(H), and
        `multimodal_embeddings` in the rows where `is_multimodal`."""
        embeddings = self.model.embed_input_ids(input_ids)
        if multimodal_embeddings:
            assert is_multimodal is not None
            rows = async_tensor_h2d(is_multimodal.nonzero()[:, 0], device=embeddings.device)
            images = torch.cat(list(multimodal_embeddings)).to(embeddings.dtype)
            embeddings.index_copy_(0, rows, images)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None,  # [T]
        positions: torch.Tensor,  # [T]
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # [T, H]
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """Returns the final hidden states [T, H]."""
        return self.model(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=None if intermediate_tensors is not None else inputs_embeds,
            **kwargs,
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns soft-capped logits [rows, V] fp32, or None on ranks that do not sample. Returns
        the hidden states themselves if `sampler_reads_hidden_states`. The cap is applied in fp32,
        as the reference does. In a 16-bit type, tanh near the cap would round the leading tokens
        together."""
        if self.sampler_reads_hidden_states():
            return hidden_states
        if len(hidden_states) == 0:
            return no_logits(hidden_states, self.config.vocab_size)
        logits = self.logits_processor(self.lm_head, hidden_states)
        return None if logits is None else self.cap_logits(logits)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a transformers state dict, or a quantised one, and returns the names of the loaded
        parameters. Encoder and decoder names address one set of weights. Raises ValueError, naming
        the tensor, if one is missing, unknown, of another shape or type, not all numbers, or an
        impossible scale."""
        # Full-attention layers' keys are their values.
        optional = [
            f"model.layers.{i}.self_attn.v_proj."
            for i, layer_type in enumerate(self.config.layer_types)
            if layer_type == "full_attention"
        ]
        ignored = []  # names in the checkpoint
        if self.config.tie_word_embeddings:
            optional.append("lm_head.")
            ignored.append("lm_head.")
        if self.vision_tower is None:
            ignored += ["model.encoder.vision_tower.", "model.encoder.embed_vision."]
        mapper = self.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix=dict.fromkeys(ignored))
        written = getattr(self.quant_config, "config", None) or {}
        if (algorithm := written.get(modelopt.READ)) is not None:
            weights = modelopt.to_compressed_tensors_weights(
                weights, algorithm, self.config.num_experts
            )
        # Some checkpoints of Gemma's carry an embedding that nothing reads.
        loader = AutoWeightsLoader(self, ignore_unexpected_prefixes=["embed_vision.embedding."])
        load = partial(loader.load_weights, mapper=mapper)
        return load_checked(self, load, weights, mapper, tuple(optional))
