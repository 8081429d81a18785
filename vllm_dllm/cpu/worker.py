"""The CPU worker of model runner v2.

Configurations name it by string: it is imported by the process that runs the model, not by the one
that the user started.
"""

from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dllm.compat import drafting
from vllm_dllm.compat.ending import leave_signals_to_engine
from vllm_dllm.compat.runner import attach_canvas_numbers, join_commits, refuse_vocabulary_adapters
from vllm_dllm.compat.step_inputs import reuse_step_inputs
from vllm_dllm.compat.worker_logprobs import restrict_prompt_logprobs, score_named_tokens
from vllm_dllm.config.workers import SPECULATORS
from vllm_dllm.cpu import cache_size, compilation, cores, experts
from vllm_dllm.cpu.compat import kernels, ops, platform_classes
from vllm_dllm.cpu.compat.runner import allow_v2_worker_without_triton, replace_rejection_sample
from vllm_dllm.cpu.install import compute_on_chosen_cores
from vllm_dllm.cpu.kernels import replace_kernels
from vllm_dllm.cpu.verification import rejection_sample
from vllm_dllm.parents import end_with_parent


class TritonFreeCPUWorker(CPUWorker):
    """vLLM's CPU worker for diffusion models and drafters, without Triton."""

    _threads: cores.StepThreads | None = None

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        compute_on_chosen_cores()
        allow_v2_worker_without_triton()
        with cache_size.without_memory_check(vllm_config.cache_config):
            super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Installs kernels and speculators without Triton, and makes the model runner."""
        ops.request_amx_permission()
        replace_kernels()
        replace_rejection_sample(rejection_sample)
        kernels.prefer_expert_kernel(experts.Bf16Experts)
        platform_classes.use_uneven_communicator()
        platform_classes.use_batched_adapters()
        drafting.set_speculator_classes(*SPECULATORS)
        super().init_device()
        compilation.reuse_compiled_models(self.vllm_config)  # the key has the number of threads

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model. Raises ValueError if a KV cache of a set size is too small."""
        refuse_vocabulary_adapters(self.model_runner)
        super().load_model(**kwargs)
        restrict_prompt_logprobs(self.model_runner)
        score_named_tokens(self.model_runner)
        if self.model_config.is_diffusion:
            reuse_step_inputs(self.model_runner)
        self._threads = cores.make_step_threads(
            self.model_runner.model, self.model_config.get_total_num_hidden_layers()
        )
        # An error raised here is not wrapped in vLLM's own.
        if (size := self.cache_config.kv_cache_memory_bytes) is not None:
            cache_size.check_longest_request_fits(size, self.get_kv_cache_spec(), self.vllm_config)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Always raises ValueError: CPU kernels have packed copies of the old weights."""
        raise ValueError(
            "Weights cannot be reloaded on CPUs, whose kernels have packed them. Restart the "
            "server with the other weights."
        )

    start_weight_update = start_draft_weight_update = reload_weights  # a trainer's, over vLLM's API

    def determine_available_memory(self) -> int:
        """Returns the size of the KV cache in bytes. Warms the model up first, as vLLM does, to
        count the memory that it takes. Raises ValueError if the longest request does not fit."""
        if self.cache_config.kv_cache_memory_bytes is not None:
            return super().determine_available_memory()
        # As in vLLM, without its check that its default share of the memory is free.
        if not envs.VLLM_CPU_CI_ENV:
            self.model_runner.warming_up_model()
        node_id = get_allowed_cpu_list()[0].numa_node
        available = cache_size.available_cache_bytes(self.cache_config, node_id)
        return cache_size.choose_cache_bytes(available, self.get_kv_cache_spec(), self.vllm_config)

    def compile_or_warm_up_model(self) -> Any:
        """Compiles or warms up as vLLM does, and leaves signals to the engine from then on."""
        done = super().compile_or_warm_up_model()
        leave_signals_to_engine()
        return done

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Runs the model on a step. Where nothing is left to wait for, also samples, and returns
        the tokens: vLLM's engine would otherwise make another call for them, a round trip for each
        step. Elsewhere returns what vLLM's worker returns, which is None before `sample_tokens`."""
        if self._threads is not None and (num_rows := scheduler_output.total_num_scheduled_tokens):
            self._threads.set_for_step(num_rows)
        join_commits(self.model_runner, scheduler_output)
        drafting.send_widths_to_speculator(self.model_runner, scheduler_output)
        output = super().execute_model(scheduler_output)
        samples_at_once = (
            self.model_config.is_diffusion
            and not scheduler_output.has_structured_output_requests  # whose masks come later
            and not self.scheduler_config.async_scheduling  # where the engine has already asked
        )
        return self.sample_tokens(None) if output is None and samples_at_once else output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Returns the sampled tokens, numbers of canvases and predicted draft widths."""
        output = attach_canvas_numbers(self.model_runner, super().sample_tokens(grammar_output))
        return drafting.send_predicted_widths(self.model_runner, output)
