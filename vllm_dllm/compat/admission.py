"""How vLLM's input processor admits a request: with our checks in place of its refusals."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm.compat.patching import is_server, patch

KEYS_OF_VLLM = frozenset(
    {"ec_transfer_params", "kv_cache_report_mode", "kv_transfer_params", "session_id"}
)
"""Keys of `SamplingParams.extra_args` that vLLM itself reads."""

_STORED_PARAMETERS = {"data_parallel_rank", "kv_hints", "priority", "session_id", "trace_headers"}
"""Parameters of `process_inputs` that vLLM only stores in the request it returns."""


class AdmittedPrompt(dict[str, Any]):
    """A rendered prompt whose request was admitted before its response began."""

    request: EngineCoreRequest


class _NonDiffusionConfig:
    """A ModelConfig that says it is not of a diffusion model."""

    is_diffusion = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def set_admission(
    architectures: Collection[str],
    describe_server: Callable[..., Any],
    admit: Callable[..., Any],
    admit_target: Callable[..., Any],
) -> None:
    """Has requests of diffusion models of `architectures` admitted by `admit(params, facts,
    resolve)`, where `facts` is `describe_server(vllm_config, tokenizer, to_many=...)`, and those of
    models with a drafter by `admit_target(params, resolve)`. `resolve(params)` is vLLM's own
    `process_inputs`, without its refusal of most sampling parameters and of structured outputs for
    diffusion models. Repeatable."""
    to_many = is_server()

    def make(stock: Any) -> Any:
        def process_inputs(
            self: InputProcessor,
            request_id: str,
            prompt: Any,
            params: Any,
            *args: Any,
            **kwargs: Any,
        ) -> EngineCoreRequest:
            if isinstance(prompt, AdmittedPrompt):
                prompt.request.request_id = request_id
                for name in _STORED_PARAMETERS & kwargs.keys():
                    setattr(prompt.request, name, kwargs[name])
                return prompt.request

            def resolve(params: SamplingParams) -> EngineCoreRequest:
                return stock(processor, request_id, prompt, params, *args, **kwargs)

            processor, model = self, self.model_config
            is_ours = model.is_diffusion and model.architecture in architectures
            if not isinstance(params, SamplingParams) or not (is_ours or self.speculative_config):
                return resolve(params)
            if not is_ours:
                return admit_target(params, resolve)
            if not hasattr(self, "facts"):
                self.facts = describe_server(self.vllm_config, self.tokenizer, to_many=to_many)
                self.permissive = copy.copy(self)
                self.permissive.model_config = _NonDiffusionConfig(model)
                self.permissive.structured_outputs_config = None
            processor = self.permissive
            return admit(params, self.facts, resolve)

        return process_inputs

    patch("v1.engine.input_processor:InputProcessor.process_inputs", make)


def admit_prompt(
    engine: Any, prompt: Any, params: Any, request_id: str, options: Mapping[str, Any]
) -> Any:
    """Returns `prompt` as an AdmittedPrompt, with the request that vLLM makes of it; or unchanged,
    if it is text, whose tokens are not known yet. `options`: keyword arguments of
    `AsyncLLM.generate`.

    Raises:
        VLLMValidationError: the request is refused.
    """
    if isinstance(prompt, AdmittedPrompt) or not (isinstance(prompt, dict) and "type" in prompt):
        return prompt
    admitted = AdmittedPrompt(prompt)
    names = options.keys() & (_STORED_PARAMETERS | {"lora_request"})
    admitted.request = engine.input_processor.process_inputs(
        request_id, prompt, params, ("generate",), **{name: options[name] for name in names}
    )
    return admitted


# How many token ids vLLM's sampler can hold of a request; more would raise in the worker. Copied
# from `vllm/v1/worker/gpu/sample/logit_bias.py`, which imports the worker's modules.
MAX_ALLOWED_TOKENS = 1024
MAX_STOP_TOKENS = 128


def max_bad_word_tokens() -> int:
    """Returns how many tokens all bad words of a request may have together: an environment variable
    of vLLM's."""
    return envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
