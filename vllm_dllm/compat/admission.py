"""Which requests vLLM admits, and which class adjusts its configuration for a model."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import ModelConfig
from vllm.model_executor.models import config as models_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import input_processor


def set_request_check(check: Callable[..., Any]) -> None:
    """Replaces vLLM's admission check of diffusion requests, `validate_diffusion_sampling_params`,
    by `check`, of the same signature."""
    input_processor.validate_diffusion_sampling_params = check


Check = Callable[[SamplingParams], None]


def set_params_checks(
    numbers: Check,
    choices: Check,
    sampler_limits: Check,
    encode: Callable[[SamplingParams, Any], None],
) -> None:
    """Checks of sampling parameters at their admission, of diffusion models and of targets with a
    drafter.

    `numbers` sees all of them; `encode` those of diffusion models, with the tokenizer, if there is
    one. The others see those that name tokens, with the stop tokens and bad
    words that the engine will see: `choices` what may be chosen, `sampler_limits` what vLLM's own
    sampler serves. Repeatable.
    """
    if input_processor.InputProcessor._validate_params.__module__ == __name__:
        return
    stock_validate_params = input_processor.InputProcessor._validate_params

    def validate_params(self: input_processor.InputProcessor, params: Any, *args: Any) -> Any:
        found = stock_validate_params(self, params, *args)
        is_diffusion = self.model_config.is_diffusion
        if isinstance(params, SamplingParams) and (is_diffusion or self.speculative_config):
            numbers(params)
            if is_diffusion:
                encode(params, self.tokenizer)
            if _names_tokens(params):
                own = params.clone()
                eos = self.renderer.get_eos_token_id()
                own.update_from_generation_config(self.generation_config_fields, eos)
                if self.tokenizer is not None:
                    own.update_from_tokenizer(self.tokenizer)
                choices(own)
                if not is_diffusion:
                    sampler_limits(own)
        return found

    input_processor.InputProcessor._validate_params = validate_params


def _names_tokens(params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids
        or params.logprob_token_ids
        or params.stop_token_ids
        or params.bad_words
    )


def set_serving_config(architecture: str, serving_config: type) -> None:
    """Makes `serving_config`, a VerifyAndUpdateConfig, adjust vLLM's configuration for models of
    `architecture`."""
    models_config.MODELS_CONFIG_MAP[architecture] = serving_config


_stock_validate_diffusion = SamplingParams._validate_diffusion


def set_sampling_params_checks(
    checks: Mapping[str, Callable[[SamplingParams], None]],
) -> None:
    """Lifts vLLM's refusal of sampling parameters for diffusion models of these architectures;
    their values are checked as for any model, and by the architecture's own check. Repeatable."""

    def validate_diffusion(self: SamplingParams, model_config: ModelConfig) -> None:
        check = checks.get(model_config.architecture)
        if check is None:
            _stock_validate_diffusion(self, model_config)
        else:
            check(self)

    SamplingParams._validate_diffusion = validate_diffusion
