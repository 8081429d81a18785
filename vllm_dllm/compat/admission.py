"""Which requests vLLM admits."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm.compat.patching import replace


def set_request_check(check: Callable[..., Any]) -> None:
    """Replaces vLLM's admission check of diffusion requests, `validate_diffusion_sampling_params`,
    by `check`, of the same signature."""
    target = "v1.engine.input_processor:validate_diffusion_sampling_params"
    replace(target, lambda stock: check)


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

    def make(stock: Any) -> Any:
        def validate_params(self: InputProcessor, params: Any, *args: Any) -> Any:
            found = stock(self, params, *args)
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

        return validate_params

    replace("v1.engine.input_processor:InputProcessor._validate_params", make)


def _names_tokens(params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids
        or params.logprob_token_ids
        or params.stop_token_ids
        or params.bad_words
    )


def set_sampling_params_checks(
    checks: Mapping[str, Callable[[SamplingParams], None]],
) -> None:
    """Lifts vLLM's refusal of sampling parameters for diffusion models of these architectures;
    their values are checked as for any model, and by the architecture's own check. Repeatable."""

    def make(stock: Any) -> Any:
        def validate_diffusion(self: SamplingParams, model_config: ModelConfig) -> None:
            check = checks.get(model_config.architecture)
            if check is None:
                stock(self, model_config)
            else:
                check(self)

        return validate_diffusion

    replace("sampling_params:SamplingParams._validate_diffusion", make)
