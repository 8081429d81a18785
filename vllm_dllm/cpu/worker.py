"""The CPU worker of model runner v2. Configurations name it by string, so that the process that
runs the model, which is not the one that was started by the user, is the one that imports it."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dllm.compat import cpu_collectives, cpu_cores, cpu_experts, reloading
from vllm_dllm.compat.ending import leave_signals_to_engine
from vllm_dllm.compat.runner import (
    allow_v2_worker_without_triton,
    prefill_emitted_tokens,
    replace_rejection_sample,
    send_numbers,
)
from vllm_dllm.cpu import bf16_experts, cache_size, compilation, forks, threads
from vllm_dllm.cpu.launch import replace_kernels
from vllm_dllm.cpu.rejection_sample import rejection_sample
from vllm_dllm.processes.parents import end_with_parent


class TritonFreeCPUWorker(CPUWorker):
    _threads: threads.StepThreads | None = None
    _weights_lost: reloading.WeightsLost | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        forks.compute_on_chosen_cores()
        allow_v2_worker_without_triton()
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        replace_kernels()
        replace_rejection_sample(rejection_sample)
        compilation.reuse_compiled_models()
        bf16_experts.prefer()
        cpu_cores.keep_threads()
        cpu_collectives.exchange_uneven_steps()
        cpu_collectives.gather_nothing()
        if self.parallel_config.enable_expert_parallel:
            cpu_experts.leave_other_ranks_experts_out()
        reloading.keep_packed_weights_current()
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self._threads = threads.of_worker(
            self.model_runner.model, self.model_config.get_total_num_hidden_layers()
        )

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Neither iterator nor path: from where weights were loaded last. See `compat.reloading`
        for the errors."""
        if not is_checkpoint_format:
            raise ValueError(
                "is_checkpoint_format must be true on CPUs, whose kernels have packed their "
                "weights, got false"
            )
        load = partial(super().reload_weights, weights_iterator, weights_path)
        restore = super().reload_weights
        try:
            reloading.reload(self.model_config, self.model_runner.model, load, restore)
        except reloading.WeightsLost as lost:
            self._weights_lost = lost
            raise

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available
        return cache_size.cache_bytes(available, self.get_kv_cache_spec(), self.vllm_config)

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()
        leave_signals_to_engine()
        return done

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Samples at once where nothing is left to wait for, and returns the tokens. Otherwise the
        engine would be told that the model has run and ask for them: a round trip a step."""
        if self._weights_lost is not None:
            raise self._weights_lost
        if self._threads is not None and (num_rows := scheduler_output.total_num_scheduled_tokens):
            self._threads.choose(num_rows)
        prefill_emitted_tokens(self.model_runner, scheduler_output)
        output = super().execute_model(scheduler_output)
        samples_at_once = (
            self.model_config.is_diffusion
            and not scheduler_output.has_structured_output_requests  # their masks come meanwhile
            and not self.scheduler_config.async_scheduling  # there, the engine has asked already
        )
        return self.sample_tokens(None) if output is None and samples_at_once else output

    def sample_tokens(self, grammar_output: Any) -> Any:
        return send_numbers(self.model_runner, super().sample_tokens(grammar_output))
