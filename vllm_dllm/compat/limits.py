"""Where a server of vLLM can refuse a request because of what it would cost others."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm.compat.patching import is_server, replace


def set_limit_checks(
    check_parameters: Callable[[VllmConfig, SamplingParams], None],
    check_tokens: Callable[[VllmConfig, SamplingParams, int], None],
) -> None:
    """Each sees the sampling parameters of every request to a diffusion model: as they came, and
    with the tokens of their bad words and the number of the prompt's. Repeatable, and nothing in a
    process that is no server: offline, nobody waits for others."""
    if not is_server():
        return

    def make(stock: Any) -> Any:
        def process_inputs(
            self: InputProcessor,
            request_id: str,
            prompt: Any,
            params: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            checked = self.model_config.is_diffusion and isinstance(params, SamplingParams)
            if checked:
                check_parameters(self.vllm_config, params)
            request = stock(self, request_id, prompt, params, *args, **kwargs)
            if checked:
                num_tokens = len(request.prompt_token_ids or ())
                check_tokens(self.vllm_config, request.sampling_params, num_tokens)
            return request

        return process_inputs

    replace("v1.engine.input_processor:InputProcessor.process_inputs", make)
