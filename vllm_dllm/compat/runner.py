"""Model runner v2: commits that join a step, numbers of canvases in its output, and adapters."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


@torch.inference_mode()
def join_commits(runner: Any, scheduler_output: SchedulerOutput) -> None:
    """Makes the worker compute emitted tokens as part of their requests' prefill: raises
    `prefill_len` in the runner's state, in place, to all tokens that the scheduler knows.

    Call it before `scheduler_output` runs, with a scheduler that does not run ahead of the tokens.
    Does nothing if the sampler does not join commits.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if cached.req_ids and getattr(runner.sampler, "joins_commits", False):
        states = runner.req_states
        slots = [states.req_id_to_index[req_id] for req_id in cached.req_ids]
        prompts = states.prompt_len.np[slots]
        states.prefill_len.np[slots] = prompts + np.array(cached.num_output_tokens)
        states.prefill_len.copy_to_uva()


def attach_canvas_numbers(runner: Any, output: Any) -> Any:
    """Returns `output` of a worker's step. If the sampler counts canvases, first attaches its
    numbers to `output`, in place. They may still be on their way from the device."""
    take_numbers = getattr(runner.sampler, "take_numbers", None)
    if take_numbers is not None and isinstance(output, AsyncModelRunnerOutput):
        output.model_runner_output.canvas_numbers = take_numbers()
    return output


def get_canvas_numbers(output: ModelRunnerOutput) -> Any:
    """Returns the CanvasNumbers that `attach_canvas_numbers` attached to `output`, or None."""
    return getattr(output, "canvas_numbers", None)


def refuse_vocabulary_adapters(runner: Any) -> None:
    """Makes a runner with a drafter refuse adapters of embeddings or LM head when it loads them, by
    replacing its `load_lora_model`. Call it before the model is loaded. vLLM's LoRA of the LM head
    expects one row of logits per request, and a request whose drafts are verified has several."""
    stock_load_lora_model = runner.load_lora_model

    def load_lora_model(model: torch.nn.Module, *args: Any) -> torch.nn.Module:
        if runner.speculative_config is not None:
            model.embedding_modules = {}
        return stock_load_lora_model(model, *args)

    runner.load_lora_model = load_lora_model


def captured_forward_output(runner: Any) -> torch.Tensor | None:
    """Returns where `runner`'s captured forwards (FULL) leave hidden states, [rows of the largest,
    H]. None if it has captured nothing."""
    manager = runner.cudagraph_manager
    output: torch.Tensor | None = None if manager is None else manager.hidden_states
    return output


def call_before_graphs(runner: Any, prepare: Callable[[], None]) -> None:
    """Makes `runner` call `prepare` before it captures graphs to see how much memory they take, by
    replacing its `profile_cudagraph_memory`. That is the first run of attention with a cache."""
    profile = runner.profile_cudagraph_memory

    def prepare_and_profile() -> int:
        prepare()
        memory: int = profile()
        return memory

    runner.profile_cudagraph_memory = prepare_and_profile
