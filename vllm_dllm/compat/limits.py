"""Where a server of vLLM can refuse a request because of what it would cost others."""

import sys
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor


def set_limit_checks(
    check_parameters: Callable[[VllmConfig, SamplingParams], None],
    check_tokens: Callable[[VllmConfig, SamplingParams, int], None],
) -> None:
    """Each sees the sampling parameters of every request to a diffusion model: as they came, and
    with the tokens of their bad words and the number of the prompt's. Repeatable, and nothing in a
    process that is no server: offline, nobody waits for others."""
    if "vllm.entrypoints.launchers.launcher" not in sys.modules:
        return
    if InputProcessor.process_inputs.__module__ == __name__:
        return
    stock_process_inputs = InputProcessor.process_inputs

    def process_inputs(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        checked = self.model_config.is_diffusion and isinstance(params, SamplingParams)
        if checked:
            check_parameters(self.vllm_config, params)
        request = stock_process_inputs(self, request_id, prompt, params, *args, **kwargs)
        if checked:
            num_tokens = len(request.prompt_token_ids or ())
            check_tokens(self.vllm_config, request.sampling_params, num_tokens)
        return request

    InputProcessor.process_inputs = process_inputs
