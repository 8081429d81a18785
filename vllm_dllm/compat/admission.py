"""Which requests vLLM admits, and which class adjusts its configuration for a model."""

from collections.abc import Callable
from typing import Any

from vllm.config import ModelConfig
from vllm.model_executor.models import config as models_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import input_processor


def set_request_check(check: Callable[..., Any]) -> None:
    """Replaces vLLM's admission check of diffusion requests, `validate_diffusion_sampling_params`,
    by `check`, of the same signature."""
    input_processor.validate_diffusion_sampling_params = check


def set_choices_check(check: Callable[[SamplingParams], None]) -> None:
    """`check` sees, at their admission, the sampling parameters of diffusion requests that name the
    tokens to choose among, with the stop tokens and bad words that the engine will see."""
    if input_processor.InputProcessor._validate_params.__module__ == __name__:
        return
    stock_validate_params = input_processor.InputProcessor._validate_params

    def validate_params(self: input_processor.InputProcessor, params: Any, *args: Any) -> Any:
        found = stock_validate_params(self, params, *args)
        names_tokens = isinstance(params, SamplingParams) and (
            params.allowed_token_ids or params.logprob_token_ids
        )
        if self.model_config.is_diffusion and names_tokens:
            own = params.clone()
            eos = self.renderer.get_eos_token_id()
            own.update_from_generation_config(self.generation_config_fields, eos)
            if self.tokenizer is not None:
                own.update_from_tokenizer(self.tokenizer)
            check(own)
        return found

    input_processor.InputProcessor._validate_params = validate_params


def set_serving_config(architecture: str, serving_config: type) -> None:
    """Makes `serving_config`, a VerifyAndUpdateConfig, adjust vLLM's configuration for models of
    `architecture`."""
    models_config.MODELS_CONFIG_MAP[architecture] = serving_config


_stock_validate_diffusion = SamplingParams._validate_diffusion


def accept_all_sampling_params(architecture: str) -> None:
    """Lifts vLLM's refusal of sampling parameters for diffusion models of `architecture`; their
    values are checked as for any model. Repeatable."""

    def validate_diffusion(self: SamplingParams, model_config: ModelConfig) -> None:
        if model_config.architecture != architecture:
            _stock_validate_diffusion(self, model_config)

    SamplingParams._validate_diffusion = validate_diffusion
