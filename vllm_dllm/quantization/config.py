"""vLLM's reading of a compressed-tensors checkpoint: checked, and completed for CPUs."""

import torch
from transformers import PretrainedConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
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
from vllm_dllm.quantization.schemes import Scheme, recognize

logger = init_logger(__name__)

_LINEAR = torch.nn.Linear(1, 1, device="meta")  # what an expert's projection is in a checkpoint


def adapt(
    config: QuantizationConfig | None, text_config: PretrainedConfig
) -> QuantizationConfig | None:
    """`config` as a DiffusionGemma needs it; those of other formats are returned as they are.

    Raises:
        ValueError: a layer's scheme cannot be served.
    """
    if not isinstance(config, CompressedTensorsConfig):
        return config
    kv_cache_scheme = config.kv_cache_scheme
    if kv_cache_scheme is not None and current_platform.is_cpu():
        # vLLM would make the cache fp8, which the reference window rule cannot read on a CPU.
        logger.info_once("The KV cache keeps the model's type: on CPUs it is not quantised.")
        kv_cache_scheme = None
    adapted = ServedCompressedTensors(
        target_scheme_map=dict(config.target_scheme_map),
        ignore=list(config.ignore),
        quant_format=config.quant_format,
        kv_cache_scheme=kv_cache_scheme,
        config=config.config,
        transform_config=config.config.get("transform_config") if config.config else None,
        total_num_heads=config.total_num_heads,
        total_num_kv_heads=config.total_num_kv_heads,
    )
    adapted.packed_modules_mapping = config.packed_modules_mapping
    adapted.online_quantization_config = config.online_quantization_config
    layer_names.write_out(adapted, text_config)
    adapted.check(text_config)
    return adapted


class ServedCompressedTensors(CompressedTensorsConfig):
    """vLLM's configuration, with experts that CPUs can run too."""

    def check(self, text_config: PretrainedConfig) -> None:
        """Raises ValueError, naming a layer, for each scheme in use that cannot be served."""
        for scheme in {id(s): s for s in self.target_scheme_map.values()}.values():
            for name in layer_names.linears(text_config):
                if self.get_scheme_dict(_LINEAR, IN_VLLM + name) is scheme:
                    recognize(IN_CHECKPOINT + name, scheme, current_platform.is_cpu())
                    break

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if current_platform.is_cpu():
            # Its import makes vLLM know the kernel of NVFP4 linears.
            from vllm_dllm.quantization import linear as linear

            if isinstance(layer, RoutedExperts):
                return self._experts_on_cpu(layer, prefix)
        is_embedding = isinstance(layer, VocabParallelEmbedding)
        is_embedding = is_embedding and not isinstance(layer, ParallelLMHead)
        if is_embedding and self.get_scheme_dict(layer, prefix) is not None:
            raise ValueError(
                f"quantization_config quantises {IN_CHECKPOINT}embed_tokens: denoising reads the "
                f"embeddings themselves. Leave them out, with an entry in `ignore`."
            )
        return super().get_quant_method(layer, prefix)

    def _experts_on_cpu(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        from vllm_dllm.quantization.methods import (
            CompressedTensorsFp8MoEMethodOnCpu,
            CompressedTensorsNvfp4MoEMethodOnCpu,
        )

        first = f"{prefix}.0.{layer.ckpt_gate_proj_name}"
        scheme = self.get_scheme_dict(_LINEAR, first)
        if scheme is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        kind = recognize(first, scheme, on_cpu=True)
        logger.info_once(
            "vLLM has no CPU kernel for %s: experts%s run in an emulation of the GPUs' arithmetic, "
            "with weights unpacked at every use. It is exact, and slow.",
            kind.name,
            "" if kind is Scheme.FP8_DYNAMIC else " and linears",
        )
        if kind is Scheme.NVFP4:
            return CompressedTensorsNvfp4MoEMethodOnCpu(layer.moe_config)
        return CompressedTensorsFp8MoEMethodOnCpu(
            scheme["weights"], scheme["input_activations"], layer.moe_config
        )
