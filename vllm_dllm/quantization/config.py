"""vLLM's configuration of a compressed-tensors checkpoint, checked, and completed for CPUs."""

from typing import Any, TypeVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from transformers import PretrainedConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from vllm_dllm.quantization import layer_names
from vllm_dllm.quantization.layer_names import IN_CHECKPOINT, IN_VLLM
from vllm_dllm.quantization.schemes import Scheme, check_method, describe, recognize

logger = init_logger(__name__)

_LINEAR = torch.nn.Linear(1, 1, device="meta")  # what an expert's projection is in a checkpoint


def adapt(
    config: QuantizationConfig | None, text_config: PretrainedConfig
) -> QuantizationConfig | None:
    """`config` as DiffusionGemma needs it. On GPUs, methods other than compressed-tensors are
    returned unchanged, with a warning.

    Raises:
        ValueError: a layer's scheme cannot be served.
    """
    if config is None:
        return None
    if not isinstance(config, CompressedTensorsConfig):
        first = IN_CHECKPOINT + next(layer_names.linears(text_config))
        has_zero_points = any(getattr(config, name, False) for name in ("zero_point", "has_zp"))
        check_method(first, config.get_name(), has_zero_points, current_platform.is_cpu())
        _leave_to_vllm(config.get_name(), "all layers that it quantises")
        return config
    adapted = _copy(config, ServedCompressedTensors)
    layer_names.write_out(adapted, text_config)
    adapted.check(text_config)
    return adapted


def adapt_masked(config: QuantizationConfig | None) -> QuantizationConfig | None:
    """`config` as a masked model needs it: what is not of compressed-tensors is vLLM's alone."""
    if not isinstance(config, CompressedTensorsConfig):
        return config
    return _copy(config, CpuCompressedTensors)


_Kind = TypeVar("_Kind", bound="CpuCompressedTensors")


def _copy(config: CompressedTensorsConfig, kind: type[_Kind]) -> _Kind:
    kv_cache_scheme = config.kv_cache_scheme
    if kv_cache_scheme is not None and current_platform.is_cpu():
        # vLLM would use an fp8 cache, which the reference window rule cannot read on CPUs.
        logger.info_once("The KV cache has the model's type: on CPUs it is not quantised.")
        kv_cache_scheme = None
    copied = kind(
        target_scheme_map=dict(config.target_scheme_map),
        ignore=list(config.ignore),
        quant_format=config.quant_format,
        kv_cache_scheme=kv_cache_scheme,
        config=config.config,
        transform_config=config.config.get("transform_config") if config.config else None,
        total_num_heads=config.total_num_heads,
        total_num_kv_heads=config.total_num_kv_heads,
    )
    copied.packed_modules_mapping = config.packed_modules_mapping
    copied.online_quantization_config = config.online_quantization_config
    return copied


def _leave_to_vllm(scheme: str, layers: str) -> None:
    logger.warning_once(
        "Quantisation by %s is none of compressed-tensors' that are known here. vLLM loads "
        "and computes %s: missing tensors are not detected, and answers have not been compared "
        "with a reference.",
        scheme,
        layers,
    )


def _log_emulation(kind: Scheme, has_experts: bool) -> None:
    if kind is Scheme.NVFP4 or (kind is not Scheme.INT8 and has_experts):
        logger.info_once(
            "vLLM has no CPU kernel for %s: %s run in an emulation of the GPU's "
            "arithmetic that unpacks the weights at every use. It is exact but slow.",
            kind.name if kind is Scheme.NVFP4 else f"experts in {kind.name}",
            "these layers" if kind is Scheme.NVFP4 else "they",
        )


def _check_inputs(scheme: dict[str, Any] | None) -> None:
    """Raises ValueError for int8 inputs on a CPU that cannot multiply them."""
    inputs: QuantizationArgs | None = scheme and scheme.get("input_activations")
    if inputs is not None and inputs.type == QuantizationType.INT:
        from vllm_dllm.compat.cpu_ops import check_int8

        check_int8()


class CpuCompressedTensors(CompressedTensorsConfig):
    """vLLM's configuration, plus linears and experts that CPUs can run."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if current_platform.is_cpu():
            # Importing it registers the kernels for linears.
            from vllm_dllm.quantization import linear as linear

            if isinstance(layer, RoutedExperts):
                return self._experts_on_cpu(layer, prefix)
            if isinstance(layer, LinearBase):
                _check_inputs(self.get_scheme_dict(layer, prefix))
        return super().get_quant_method(layer, prefix)

    def _experts_on_cpu(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        from vllm_dllm.quantization.methods import (
            CompressedTensorsFp8MoEMethodOnCpu,
            CompressedTensorsInt4MoEMethodOnCpu,
            CompressedTensorsInt8MoEMethodOnCpu,
            CompressedTensorsNvfp4MoEMethodOnCpu,
        )

        first = f"{prefix}.0.{layer.ckpt_gate_proj_name}"
        scheme = self.get_scheme_dict(_LINEAR, first)
        if scheme is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        weights, inputs = scheme["weights"], scheme["input_activations"]
        _check_inputs(scheme)
        kind = recognize(first, scheme, on_cpu=True)
        _log_emulation(kind, has_experts=True)
        match kind:
            case Scheme.NVFP4:
                return CompressedTensorsNvfp4MoEMethodOnCpu(layer.moe_config)
            case Scheme.INT8:
                return CompressedTensorsInt8MoEMethodOnCpu(weights, inputs, layer.moe_config)
            case Scheme.W4A16:
                return CompressedTensorsInt4MoEMethodOnCpu(weights, layer.moe_config)
        return CompressedTensorsFp8MoEMethodOnCpu(weights, inputs, layer.moe_config)


class ServedCompressedTensors(CpuCompressedTensors):
    """DiffusionGemma's, all of whose layers are known here."""

    def check(self, text_config: PretrainedConfig) -> None:
        """Raises ValueError, naming a layer, for a scheme in use that cannot be served. Logs how
        the others are computed, if not by one of vLLM's kernels that we know."""
        on_cpu = current_platform.is_cpu()
        for scheme in {id(s): s for s in self.target_scheme_map.values()}.values():
            names = (
                name
                for name in layer_names.linears(text_config)
                if self.get_scheme_dict(_LINEAR, IN_VLLM + name) is scheme
            )
            if (first := next(names, None)) is None:
                continue
            kind = recognize(IN_CHECKPOINT + first, scheme, on_cpu)
            has_experts = ".experts." in first or any(".experts." in name for name in names)
            if kind is Scheme.OTHER:
                layers = f"{IN_CHECKPOINT}{first} and others of this scheme"
                _leave_to_vllm(describe(scheme), layers)
            elif on_cpu:
                _log_emulation(kind, has_experts)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        is_embedding = isinstance(layer, VocabParallelEmbedding)
        is_embedding = is_embedding and not isinstance(layer, ParallelLMHead)
        if is_embedding and self.get_scheme_dict(layer, prefix) is not None:
            raise ValueError(
                f"quantization_config quantises {IN_CHECKPOINT}embed_tokens, but denoising reads "
                f"the embeddings themselves. Exclude them with an entry in `ignore`."
            )
        return super().get_quant_method(layer, prefix)
