"""The worker of diffusion models on GPUs."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_dllm.compat.runner import prefill_emitted_tokens


class CanvasWorker(Worker):
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        prefill_emitted_tokens(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)
