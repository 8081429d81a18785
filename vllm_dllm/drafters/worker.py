"""The GPU worker of targets with a DFlash drafter. CPUs have `cpu/worker.py`."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_dllm.compat import drafting
from vllm_dllm.compat.runner import refuse_vocabulary_adapters
from vllm_dllm.compat.worker_logprobs import restrict_prompt_logprobs, score_named_tokens
from vllm_dllm.config.workers import SPECULATORS
from vllm_dllm.quantization.checked_weights import weights_in_parts


class DraftWorker(Worker):
    """vLLM's worker, which also passes draft widths between the scheduler and the speculator."""

    def init_device(self) -> None:
        """Has vLLM make our speculators, and then prepares the device."""
        drafting.set_speculator_classes(*SPECULATORS)
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model. Has the runner refuse LoRA adapters of the vocabulary, score only rows
        of a prompt, and score the tokens of `logprob_token_ids` beside drafts, too."""
        refuse_vocabulary_adapters(self.model_runner)
        super().load_model(**kwargs)
        restrict_prompt_logprobs(self.model_runner)
        score_named_tokens(self.model_runner)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads weights of a trainer, which come in parts."""
        with weights_in_parts():
            super().update_weights(*args, **kwargs)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Passes the draft widths to the speculator, and runs the step."""
        drafting.send_widths_to_speculator(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Returns vLLM's output of the step, with the widths that the speculator has predicted."""
        output = super().sample_tokens(grammar_output)
        return drafting.send_predicted_widths(self.model_runner, output)
