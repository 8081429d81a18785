"""Where vLLM admits a request."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm.compat.patching import is_server, replace

KEYS_OF_VLLM = frozenset(
    {"ec_transfer_params", "kv_cache_report_mode", "kv_transfer_params", "session_id"}
)
"""What vLLM itself reads in `SamplingParams.extra_args`."""


_TOLD_LATER = {"data_parallel_rank", "kv_hints", "priority", "session_id", "trace_headers"}
"""Parameters of `process_inputs` that its request only takes along."""


class Admitted(dict[str, Any]):
    """A rendered prompt of a request that has been admitted before its stream begins."""

    request: EngineCoreRequest


class _NoDiffusion:
    """A ModelConfig as it would be of another model."""

    is_diffusion = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def set_admission(
    architectures: Collection[str],
    served: Callable[..., Any],
    admit: Callable[..., Any],
    admit_target: Callable[..., Any],
) -> None:
    """Requests come in through `admit(params, served(config, tokenizer, to_many=...), resolve)` if
    the model is a diffusion model of one of `architectures`, and through
    `admit_target(params, resolve)` if it has a drafter. Of diffusion models vLLM refuses most
    sampling parameters and structured outputs; `resolve` does without that. Repeatable."""
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
            if isinstance(prompt, Admitted):
                prompt.request.request_id = request_id
                for name in _TOLD_LATER & kwargs.keys():
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
            if not hasattr(self, "admits"):
                self.admits = served(self.vllm_config, self.tokenizer, to_many=to_many)
                self.resolves = copy.copy(self)
                self.resolves.model_config = _NoDiffusion(model)
                self.resolves.structured_outputs_config = None
            processor = self.resolves
            return admit(params, self.admits, resolve)

        return process_inputs

    replace("v1.engine.input_processor:InputProcessor.process_inputs", make)


def admitted(
    engine: Any, prompt: Any, params: Any, request_id: str, options: Mapping[str, Any]
) -> Any:
    """`prompt`, once the request of an AsyncLLM is admitted, or as it is, if that must wait.
    `options` are those of `AsyncLLM.generate`.

    Raises:
        VLLMValidationError: it is not.
    """
    if isinstance(prompt, Admitted) or not (isinstance(prompt, dict) and "type" in prompt):
        return prompt  # a text's tokens are not known yet
    found = Admitted(prompt)
    processor = engine.input_processor
    told = {name: options[name] for name in options.keys() & (_TOLD_LATER | {"lora_request"})}
    found.request = processor.process_inputs(request_id, prompt, params, ("generate",), **told)
    return found


# The room that vLLM's sampler has for a request's lists; more raises in the worker. Of
# `vllm/v1/worker/gpu/sample/logit_bias.py`, whose import takes the worker's modules along.
MAX_ALLOWED_TOKENS = 1024
MAX_STOP_TOKENS = 128


def most_bad_word_tokens() -> int:
    """The most that all bad words may have together; an environment variable sets it."""
    return envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
