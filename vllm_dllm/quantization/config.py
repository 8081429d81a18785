"""vLLM's configuration of a compressed-tensors checkpoint, checked, and completed for CPUs."""

from importlib import import_module
from typing import Any, Self

import torch
from transformers import PretrainedConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from vllm_dllm.quantization import modelopt
from vllm_dllm.quantization.schemes import (
    IN_CHECKPOINT,
    IN_VLLM,
    Scheme,
    add_vllm_names,
    check_other_method,
    describe_scheme,
    list_linears,
    recognize_scheme,
)

logger = init_logger(__name__)

LINEAR = torch.nn.Linear(1, 1, device="meta")
"""Stands for an expert's projection, which is a linear layer in a checkpoint."""


def adapt_quant_config(
    config: QuantizationConfig | None, text_config: PretrainedConfig
) -> QuantizationConfig | None:
    """Returns `config` as DiffusionGemma needs it. Compressed-tensors' becomes a checked copy with
    vLLM's names of layers. Other methods are returned unchanged, with a warning in the log if they
    are not ModelOpt's; CPUs refuse them. None: the checkpoint is not quantised.

    Raises:
        ValueError: a layer's scheme or the method cannot be served.
    """
    if config is None:
        return None
    if not isinstance(config, CompressedTensorsConfig):
        first = IN_CHECKPOINT + next(list_linears(text_config))
        has_zero_points = any(getattr(config, name, False) for name in ("zero_point", "has_zp"))
        check_other_method(
            first,
            config.get_name(),
            has_zero_points=has_zero_points,
            on_cpu=current_platform.is_cpu(),
        )
        if config.get_name() not in modelopt.METHODS:
            _warn_unchecked(config.get_name(), "all layers that it quantises")
        return config
    adapted = ServedCompressedTensors.copy_of(config)
    add_vllm_names(adapted, text_config)
    adapted.check(text_config)
    return adapted


def adapt_masked_quant_config(config: QuantizationConfig | None) -> QuantizationConfig | None:
    """Returns `config` as a masked model needs it: compressed-tensors' as a copy that CPUs can run.
    Other methods are left to vLLM. None: the checkpoint is not quantised.

    Raises:
        ValueError: FP8 weights with a scale per tensor are to run on a CPU, where vLLM lacks an
            operation that loads them.
    """
    if not isinstance(config, CompressedTensorsConfig):
        if config is not None and _scales_by_tensor(config) and current_platform.is_cpu():
            check_other_method("the layers", config.get_name(), has_zero_points=False, on_cpu=True)
        return config
    return CpuReadyCompressedTensors.copy_of(config)


def _scales_by_tensor(config: QuantizationConfig) -> bool:
    """Whether vLLM's own FP8 or ModelOpt's has one scale for each weight."""
    if isinstance(config, Fp8Config):
        return config.weight_block_size is None
    return isinstance(config, ModelOptFp8Config) and config.quant_method == "FP8"


def _warn_unchecked(scheme: str, layers: str) -> None:
    """Logs once a warning that vLLM alone computes `layers`, quantised by `scheme`."""
    logger.warning_once(
        "Quantisation by %s is not one of the schemes known here. vLLM loads and computes %s: "
        "answers have not been compared with a reference.",
        scheme,
        layers,
    )


def _cpu_layers() -> Any:
    """Imports and returns `cpu.quantization.layers`, which no process on a GPU may import."""
    return import_module("vllm_dllm.cpu.quantization.layers")


class CpuReadyCompressedTensors(CompressedTensorsConfig):
    """vLLM's configuration of a compressed-tensors checkpoint, whose linears and experts CPUs can
    run, too."""

    @classmethod
    def copy_of(cls, config: CompressedTensorsConfig) -> Self:
        """Returns a copy of `config`. On CPUs the copy has no fp8 KV cache, and a line in the log
        says so."""
        copied = cls.__new__(cls)
        copied.__dict__.update(config.__dict__)
        copied.target_scheme_map = dict(config.target_scheme_map)
        copied.ignore = list(config.ignore)
        if config.kv_cache_scheme is not None and current_platform.is_cpu():
            # vLLM would use an fp8 cache, which the reference window rule cannot read on CPUs.
            logger.info_once("The KV cache has the model's type: on CPUs it is not quantised.")
            copied.kv_cache_scheme = None
        return copied

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method that loads and computes `layer`, which vLLM calls `prefix`: on CPUs
        ours, if there is one, else vLLM's. None: it is loaded and computed as in a checkpoint that
        is not quantised. Raises ValueError if this CPU cannot compute the layer."""
        if current_platform.is_cpu():
            method: QuantizeMethodBase | None
            method = _cpu_layers().choose_layer_method(self, layer, prefix)
            if method is not None:
                return method
        return super().get_quant_method(layer, prefix)


class ServedCompressedTensors(CpuReadyCompressedTensors):
    """The quantization configuration of DiffusionGemma, all of whose layers are known here."""

    def check(self, text_config: PretrainedConfig) -> None:
        """Raises ValueError, naming a layer, if a scheme that some layer uses cannot be served.
        Logs layers that are emulated on a CPU or left to vLLM."""
        on_cpu = current_platform.is_cpu()
        for scheme in {id(s): s for s in self.target_scheme_map.values()}.values():
            names = (
                name
                for name in list_linears(text_config)
                if self.get_scheme_dict(LINEAR, IN_VLLM + name) is scheme
            )
            if (first := next(names, None)) is None:
                continue
            kind = recognize_scheme(IN_CHECKPOINT + first, scheme, on_cpu)
            has_experts = ".experts." in first or any(".experts." in name for name in names)
            if kind is Scheme.OTHER:
                layers = f"{IN_CHECKPOINT}{first} and others of this scheme"
                _warn_unchecked(describe_scheme(scheme), layers)
            elif on_cpu:
                _cpu_layers().log_emulation(kind, has_experts)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method that loads and computes `layer`, as its parent does. Raises ValueError
        also if embeddings are quantised."""
        is_lm_head = isinstance(layer, ParallelLMHead)
        is_embedding = isinstance(layer, VocabParallelEmbedding) and not is_lm_head
        if is_embedding and self.get_scheme_dict(layer, prefix) is not None:
            raise ValueError(
                f"quantization_config quantises {IN_CHECKPOINT}embed_tokens, but denoising reads "
                f"the embeddings themselves. Exclude them with an entry in `ignore`."
            )
        return super().get_quant_method(layer, prefix)
