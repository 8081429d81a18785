"""The CPU worker of model runner v2. Configurations name it by string, so that the process that
runs the model, which is not the one that was started by the user, is the one that imports it."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dllm.compat.runner import (
    allow_v2_worker_without_triton,
    prefill_emitted_tokens,
    replace_rejection_sample,
)
from vllm_dllm.cpu import compilation
from vllm_dllm.cpu.launch import replace_kernels
from vllm_dllm.cpu.rejection_sample import rejection_sample


class TritonFreeCPUWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        allow_v2_worker_without_triton()
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        replace_kernels()
        replace_rejection_sample(rejection_sample)
        compilation.reuse_compiled_models()
        super().init_device()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Samples at once where nothing is left to wait for, and returns the tokens. Otherwise the
        engine would be told that the model has run and ask for them: a round trip a step."""
        prefill_emitted_tokens(self.model_runner, scheduler_output)
        output = super().execute_model(scheduler_output)
        samples_at_once = (
            self.model_config.is_diffusion
            and not scheduler_output.has_structured_output_requests  # their masks come meanwhile
            and not self.scheduler_config.async_scheduling  # there, the engine has asked already
        )
        return self.sample_tokens(None) if output is None and samples_at_once else output
