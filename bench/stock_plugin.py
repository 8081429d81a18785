"""What vLLM loads in place of this project's plugin, to run its own DiffusionGemma on a CPU."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import (
    DiffusionGemmaModelForBlockDiffusionConfig,
    VerifyAndUpdateConfig,
)

from vllm_dllm.compat.startup import set_serving_config
from vllm_dllm.config.architectures import DIFFUSION_GEMMA
from vllm_dllm.cpu.install import install


def register() -> None:
    install()
    set_serving_config(DIFFUSION_GEMMA, StockServingConfig)


class StockServingConfig(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        attention_config = vllm_config.attention_config
        backend = attention_config.backend
        DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)
        attention_config.backend = backend  # it picks Triton's
