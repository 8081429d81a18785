"""How vLLM's input processor admits a request: with our checks in place of its refusals."""

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_dllm.compat.patching import is_server, wrap

KEYS_OF_VLLM = {"ec_transfer_params", "kv_cache_report_mode", "kv_transfer_params", "session_id"}
"""Keys of `SamplingParams.extra_args` that vLLM itself reads."""

_STORED_PARAMETERS = {"data_parallel_rank", "kv_hints", "priority", "session_id", "trace_headers"}
"""Parameters of `process_inputs` that vLLM only stores in the request it returns."""


class AdmittedPrompt(dict[str, Any]):
    """A rendered prompt whose request was admitted before its response began."""

    request: EngineCoreRequest  # made of the prompt


class _NonDiffusionConfig:
    """Wraps a ModelConfig and says that it is of no diffusion model, so that vLLM does not refuse
    sampling parameters and structured outputs."""

    is_diffusion = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _without_refusals(processor: Any) -> Any:
    """Returns a copy of vLLM's InputProcessor that refuses no sampling parameters and structured
    outputs for being those of a diffusion model."""
    permissive = copy.copy(processor)
    permissive.model_config = _NonDiffusionConfig(processor.model_config)
    permissive.structured_outputs_config = None
    return permissive


def set_admission(
    architectures: Collection[str],
    describe_server: Callable[..., Any],
    admit: Callable[..., Any],
    admit_target: Callable[..., Any],
) -> None:
    """Has requests admitted by our functions, by a patch of vLLM's `process_inputs`. Repeatable.

    Args:
        architectures: the diffusion models whose requests `admit` admits.
        describe_server: called once, as `describe_server(vllm_config, tokenizer, to_many=...)`.
            `to_many`: whether this process serves HTTP.
        admit: called as `admit(params, served, resolve)`. `served` is what `describe_server`
            returned. `resolve(params)` is vLLM's own `process_inputs`, and returns the engine's
            request. Here it does not refuse structured outputs and most sampling parameters.
        admit_target: called as `admit_target(params, vocab_size, resolve, to_many=...)` for other
            models with a drafter.
    """
    to_many = is_server()

    @wrap("v1.engine.input_processor:InputProcessor.process_inputs")
    def process_inputs(
        stock: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        """Returns the engine's request: the one of an admitted prompt, under its new id; what our
        functions make of the parameters of a model that they are for; else vLLM's own."""
        if isinstance(prompt, AdmittedPrompt):
            prompt.request.request_id = request_id
            for name in _STORED_PARAMETERS & kwargs.keys():
                setattr(prompt.request, name, kwargs[name])
            return prompt.request

        def resolve(processor: Any, params: Any) -> EngineCoreRequest:
            return stock(processor, request_id, prompt, params, *args, **kwargs)

        model = self.model_config
        is_ours = model.is_diffusion and model.architecture in architectures
        if not isinstance(params, SamplingParams) or not (is_ours or self.speculative_config):
            return resolve(self, params)
        if not is_ours:
            own = partial(resolve, self)
            return admit_target(params, model.get_vocab_size(), own, to_many=to_many)
        if not hasattr(self, "vllm_dllm_served"):
            self.vllm_dllm_served = describe_server(
                self.vllm_config, self.tokenizer, to_many=to_many
            )
            self.vllm_dllm_permissive = _without_refusals(self)
        return admit(params, self.vllm_dllm_served, partial(resolve, self.vllm_dllm_permissive))


def admit_prompt(
    engine: Any, prompt: Any, params: Any, request_id: str, options: Mapping[str, Any]
) -> Any:
    """Returns `prompt` as an AdmittedPrompt, with the engine's request that vLLM makes of it.
    Returns it unchanged if it is one already, or if it is text, whose tokens are not known yet.
    `engine`: vLLM's AsyncLLM. `options`: keyword arguments of `AsyncLLM.generate`. Raises
    VLLMValidationError if the request is refused."""
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
