"""Which class reads a checkpoint's config.json."""

from transformers import PretrainedConfig
from vllm.transformers_utils import config as vllm_transformers_config


def set_config_class(model_type: str, config_class: type[PretrainedConfig]) -> None:
    """Checkpoints of `model_type` are read with `config_class`, and not with code that they bring.
    Repeatable."""
    vllm_transformers_config._CONFIG_REGISTRY[model_type] = config_class
