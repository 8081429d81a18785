"""Which class adjusts vLLM's configuration for a model."""

from vllm_dllm.compat.patching import put


def set_serving_config(architecture: str, serving_config: type) -> None:
    """Makes `serving_config`, a VerifyAndUpdateConfig, adjust vLLM's configuration for models of
    `architecture`."""
    put("model_executor.models.config:MODELS_CONFIG_MAP", architecture, serving_config)
