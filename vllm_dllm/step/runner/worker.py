"""The worker of diffusion models on GPUs."""

import time
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.gpu_worker import Worker

from vllm_dllm.attention.ahead import Compiler, compile_ahead
from vllm_dllm.attention.warm_up import compile_attention
from vllm_dllm.compat.ending import leave_signals_to_engine
from vllm_dllm.compat.runner import (
    attach_canvas_numbers,
    call_before_graphs,
    captured_forward_output,
    join_commits,
)
from vllm_dllm.compat.step_inputs import reuse_step_inputs
from vllm_dllm.compat.worker_logprobs import compile_prompt_logprobs, restrict_prompt_logprobs
from vllm_dllm.parents import end_with_parent
from vllm_dllm.quantization.checked_weights import weights_in_parts
from vllm_dllm.step.runner.kernel_choice import choose_kernels, prepare_choice

logger = init_logger(__name__)

WARMED_UP = (
    SamplingParams(),
    SamplingParams(top_k=50),
    SamplingParams(top_p=0.9),
    SamplingParams(logprobs=5),
)
"""Parameters of requests whose steps run different kernels. vLLM warms up with one request that
asks for everything, and our sampler computes less for requests that ask for less."""


class CanvasWorker(Worker):
    """Adds to vLLM's GPU worker: measured kernels, and canvases committed beside their
    successors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        self._compiler: Compiler | None = None
        super().__init__(*args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model, starts to compile attention, and restricts prompt log-probabilities to
        rows of prompts."""
        super().load_model(**kwargs)
        prepare_choice(self.vllm_config, self.model_runner.model)
        self._compiler = compile_ahead(
            self.vllm_config,
            self.vllm_config.compilation_config.static_forward_context.values(),
            has_images=self.model_runner.supports_mm_inputs,
        )
        if self._compiler is not None:
            call_before_graphs(self.model_runner, self._compiler.wait)
        restrict_prompt_logprobs(self.model_runner)
        reuse_step_inputs(self.model_runner)
        state = self.model_runner.model_state
        state.forward_output = partial(captured_forward_output, self.model_runner)

    def determine_available_memory(self) -> int:
        """Returns the bytes that are free for the KV cache. Drops the step's graphs, which vLLM
        captured to measure their memory. vLLM 0.33 also adds a request with every option to each
        slot, and leaves it there: such a one would hold 2.5 MiB of a large vocabulary."""
        with self.model_runner.sampler.replace_params(SamplingParams()):
            available: int = super().determine_available_memory()
        self.model_runner.model_state.drop_graphs()  # vLLM has captured to see how much they take
        return available

    def compile_or_warm_up_model(self) -> Any:
        """Measures, compiles and warms up kernels, then has vLLM capture graphs. Returns vLLM's
        result."""
        if self._compiler is not None:
            self._compiler.wait()
        # Before graphs are captured: what they read must not be allocated anew, and they keep the
        # kernels of their capture.
        choose_kernels(self.vllm_config, self.model_runner.model)
        if self.vllm_config.kernel_config.enable_jit_warmup:
            begin = time.monotonic()
            compile_attention(
                self.vllm_config.compilation_config.static_forward_context.values(),
                self.model_config.dtype,
                self.scheduler_config.max_num_batched_tokens,
                self.model_config.max_model_len,
                has_images=self.model_runner.supports_mm_inputs,
            )
            for params in WARMED_UP:
                with self.model_runner.sampler.replace_params(params):
                    warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
            compile_prompt_logprobs(self.model_runner)
            seconds = time.monotonic() - begin
            logger.info("Kernels were compiled and warmed up in %.0f s.", seconds)
        done = super().compile_or_warm_up_model()
        leave_signals_to_engine()
        return done

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads weights of a trainer, which come in parts."""
        with weights_in_parts():
            super().update_weights(*args, **kwargs)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Executes the model, with finished blocks committed beside their successors."""
        join_commits(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples without vLLM's grammar masks: ours are `step/asked/grammars.py`, and vLLM's
        warm-up has masks for rows that a model does not have where first tokens are known."""
        return attach_canvas_numbers(self.model_runner, super().sample_tokens(None))
