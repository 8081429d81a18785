"""Places in vLLM that `vllm_dllm/compat` depends on, and what each must still say, as data.

`scripts/vllm_seams.py` looks for them in any copy of vLLM's sources: `tests/unit/compat` in the
installed one, `scripts/check_vllm.py VERSION` in any other. If a seam has moved, read the new
source, then change `compat/`.

The text files have, for each seam, what we rely on, below it the place, with the versions of vLLM
that differ, and behind bars the text that must be in the source there.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_dllm.compat import log_lines


@dataclass(frozen=True)
class Seam:
    """A place in vLLM and what it must say."""

    what: str
    """What we rely on, for the error."""
    place: str
    """module:names below `vllm`, or the module alone."""
    text: str
    """Text that must be in the source there."""
    since: str = "0"
    until: str | None = None
    """The first version that no longer has it."""


def read_seams(file: Path) -> Iterator[Seam]:
    """Yields the seams of a text file."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    for seam in re.split(r"\n(?! )", "\n".join(lines)):
        what, place, *text = seam.splitlines()
        place, *versions = place.split()
        limits = dict(zip(versions[::2], versions[1::2], strict=True))
        yield Seam(what, place, "\n".join(line[4:] for line in text), **limits)


# Logger, which is a module -> what it logs.
_LOGGED = (*log_lines.FAILED_START.items(), *log_lines.WRONG_CPU_WARNINGS.items())
_LOGGED += (
    (log_lines.WORKER, log_lines.FAILED_CALL),
    ("vllm.v1.engine.utils", log_lines.ENGINE_FAILED),
)
SEAMS = [
    *(seam for file in sorted(Path(__file__).parent.glob("*.txt")) for seam in read_seams(file)),
    *(Seam(f"vLLM logs: {text}", logger.removeprefix("vllm."), text) for logger, text in _LOGGED),
]

SIGNATURES = {
    "v1.core.sched.diffusion_scheduler:diffusion_canvas_width": "request canvas_length",
    "v1.engine.async_llm:AsyncLLM.abort": "self request_id internal",
    "v1.structured_output:StructuredOutputManager._get_constraint_bounds": (
        "self request spec_tokens spec_tokens_committed"
    ),
    "v1.structured_output:StructuredOutputManager._get_reasoner": "self request",
    "v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs": (
        "self logits_fn hidden_states input_batch all_token_ids num_computed_tokens prompt_lens"
    ),
}
"""Parameters of functions that we call, by place."""
REPLACED = {
    "v1.engine.input_processor:InputProcessor.process_inputs": (
        "self request_id prompt params supported_tasks arrival_time lora_request "
        "tokenization_kwargs trace_headers priority data_parallel_rank resumable session_id "
        "kv_hints"
    ),
    "v1.engine.input_processor:InputProcessor.resolve_watermarking": "self params",
    "engine.arg_utils:EngineArgs.create_engine_config": "self usage_context headless",
    "v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs": "self logprobs_lists",
    "v1.engine.async_llm:AsyncLLM.generate": (
        "self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs "
        "trace_headers priority data_parallel_rank session_id kv_hints reasoning_ended "
        "reasoning_parser_kwargs"
    ),
    "entrypoints.launchers.app:init_exception_handler": "app",
    "entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator": (
        "self request result_generator request_id model_name conversation tokenizer "
        "request_metadata parser mm_token_counts"
    ),
    "entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs": (
        "self token_ids top_logprobs tokenizer num_output_top_logprobs logprob_token_ids "
        "return_as_token_id"
    ),
    "entrypoints.openai.completion.serving:OpenAIServingCompletion._create_completion_logprobs": (
        "self token_ids top_logprobs num_output_top_logprobs tokenizer logprob_token_ids "
        "initial_text_offset return_as_token_id"
    ),
    "parser.parser_manager:ParserManager.get_parser": (
        "cls tool_parser_name reasoning_parser_name enable_auto_tools model_name is_harmony "
        "tool_strict_level tokenizer"
    ),
    "v1.engine.async_llm:AsyncLLM.shutdown": "self timeout",
    "v1.engine.async_llm:AsyncLLM.check_admission": "self n request_id",
    "entrypoints.launchers.launcher:NoSignalServer.shutdown": "self sockets",
    "entrypoints.launchers.launcher:create_server_socket": "addr reuse_port",
    "v1.engine.core:EngineCore.post_step": "self model_executed",
    "v1.worker.gpu.model_runner:init_speculator": "vllm_config device req_states",
    "config.vllm:VllmConfig.use_v2_model_runner": "self",
    "config.vllm:VllmConfig._validate_v2_model_runner": "self",
    "compilation.decorators:_try_load_aot_compiled_fn": "model aot_compilation_path",
    "distributed.device_communicators.shm_broadcast:SpinCondition.__init__": (
        "self is_reader context notify_address busy_loop_s"
    ),
    "v1.engine.utils:get_mp_context": "",
    "v1.executor.multiproc_executor:get_mp_context": "",
    "platforms.cpu:CpuPlatform.get_device_communicator_cls": "cls",
    "platforms.cpu:CpuPlatform.get_punica_wrapper": "cls",
    "lora.model_manager:get_supported_lora_modules": "model",
    "model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls": "backend",
}
"""Parameters of functions that we replace, by target. Of other targets (`patching.PATCHES`) only
the name must be there. Overridden methods are compared with ours."""
OF_SOME_VERSIONS: dict[str, tuple[str, str | None]] = {
    "entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator": (
        "0",
        "0.33",
    ),
    "v1.worker.gpu_worker:HAS_TRITON": ("0.33", None),
}
"""Target that not all versions have -> the first version that has it, and the first that lacks it
again."""
