"""The worker of targets with a DFlash drafter, on GPUs. On CPUs it is `cpu/worker.py`."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_dllm.compat import drafting
from vllm_dllm.compat.runner import keep_prompts_private, leave_vocabulary_to_base
from vllm_dllm.config.workers import SPECULATORS


class DraftWorker(Worker):
    def init_device(self) -> None:
        drafting.draft_with(*SPECULATORS)
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        leave_vocabulary_to_base(self.model_runner)
        super().load_model(**kwargs)
        keep_prompts_private(self.model_runner)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        drafting.tell_widths(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        return drafting.send_predicted_widths(self.model_runner, output)
