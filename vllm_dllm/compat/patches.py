"""The names of vLLM that this project replaces while a process runs. There are no others.

`patching.patch` installs by this table. `docs/upstream/README.md` shows it, and proposes to vLLM
what would end each row; `scripts/upstream_table.py` writes it there. `seams` compares parameters.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One replaced name of vLLM's."""

    target: str
    """"module:name" or "module:Class.name" below `vllm`. With `[]`: an entry of that dictionary."""
    why: str
    """What needs it."""
    upstream: str
    """What change of vLLM would make it unnecessary; Markdown, relative to docs/upstream/."""
    takes: str | None = None
    """The parameters that a replaced function is expected to have, by name; "" for none."""
    since: str = "0"
    """The first version of vLLM that has the name."""
    until: str | None = None
    """The first version of vLLM that no longer has it."""


_HOOK = "[a model-owned check](#diffusion-models-own-their-request-checks)"
_BEFORE = "[checks before the stream](#checks-before-the-stream)"

EVERYWHERE = (
    Patch(
        "v1.engine.input_processor:InputProcessor.process_inputs",
        "temperature, seed, penalties, forms, … with diffusion models; HTTP 400 for wrong request "
        "keys, and for what would end the engine or starve others",
        _HOOK,
        "self request_id prompt params supported_tasks arrival_time lora_request "
        "tokenization_kwargs trace_headers priority data_parallel_rank resumable session_id "
        "kv_hints",
    ),
    Patch(
        "v1.engine.input_processor:InputProcessor.resolve_watermarking",
        "HTTP 400 for beam search, an error offline",
        _HOOK,
        "self params",
    ),
    Patch(
        "model_executor.models.config:MODELS_CONFIG_MAP[]",
        "start-up checks of a model of ours",
        "[a registration function](#out-of-tree-models-adjust-the-configuration)",
    ),
    Patch(
        "engine.arg_utils:EngineArgs.create_engine_config",
        "start-up errors of one line; our scheduler and worker for targets with a DFlash drafter",
        "[a speculator registry](#speculators-and-their-schedulers-by-name)",
        "self usage_context headless",
    ),
    Patch(
        "v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        "the step that revealed a token, beside its log-probability",
        "a field of a model's own beside each rank",
        "self logprobs_lists",
    ),
    Patch(
        "v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls",
        "metrics of canvases and drafts on `/metrics`",
        "[statistics of a scheduler's own](#a-schedulers-own-statistics)",
    ),
    Patch(
        "v1.metrics.stats:SchedulerStats.__annotations__[]",
        "the same, in messages from the engine",
        "[statistics of a scheduler's own](#a-schedulers-own-statistics)",
    ),
)

SERVER = (
    Patch(
        "v1.engine.async_llm:AsyncLLM.generate",
        "HTTP 400 for a mistake, not an event in a stream",
        _BEFORE,
        "self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs "
        "trace_headers priority data_parallel_rank session_id kv_hints reasoning_ended "
        "reasoning_parser_kwargs",
    ),
    Patch(
        "entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
        "the same of responses",
        _BEFORE,
    ),
    Patch(
        "entrypoints.launchers.app:init_exception_handler",
        "HTTP 400 for misplaced keys, tools that nobody looks for, and bodies of wrong types",
        "checks that look at types first",
        "app",
    ),
    Patch(
        "entrypoints.serve.engine.protocol:UsageInfo.__init__",
        "counts of tokens in the `usage` of chats and completions",
        "a hook of the model's on `usage`",
    ),
    Patch(
        "entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat.chat_completion_full_generator",
        "`length` or `abort` of an answer that was cut behind a call",
        "vLLM 0.33 says so itself",
        "self request result_generator request_id model_name conversation tokenizer "
        "request_metadata parser mm_token_counts",
        until="0.33",
    ),
    Patch(
        "entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs",
        "that step in chats",
        "the same",
        "self token_ids top_logprobs tokenizer num_output_top_logprobs logprob_token_ids "
        "return_as_token_id",
    ),
    Patch(
        "entrypoints.openai.completion.serving:OpenAIServingCompletion._create_completion_logprobs",
        "in completions",
        "the same",
        "self token_ids top_logprobs num_output_top_logprobs tokenizer logprob_token_ids "
        "initial_text_offset return_as_token_id",
    ),
    Patch(
        "parser.parser_manager:ParserManager.get_parser",
        "reasoning and content that are told apart in one way, streamed or not",
        "the prompt, to every reasoning parser",
        "cls tool_parser_name reasoning_parser_name enable_auto_tools model_name is_harmony "
        "tool_strict_level tokenizer",
    ),
    Patch(
        "v1.engine.logprobs:convert_ids_list_to_tokens",
        "prompt log-probabilities that do not hold up everybody",
        "a cache of token texts",
    ),
    Patch(
        "v1.engine.async_llm:AsyncLLM.shutdown",
        "requests that end when a server does",
        "[the fix of the hang](shutdown-hangs-clients.md)",
        "self timeout",
    ),
    Patch(
        "v1.engine.async_llm:AsyncLLM.check_admission",
        "no new requests meanwhile",
        "the same",
        "self n request_id",
    ),
    Patch(
        "entrypoints.launchers.launcher:NoSignalServer.shutdown",
        "and no wait for clients that do not read",
        "the same",
        "self sockets",
    ),
    Patch(
        "entrypoints.launchers.launcher:create_server_socket",
        "one line for a port that is in use",
        "an error that says what to do",
        "addr reuse_port",
    ),
)

ENGINE = (
    Patch(
        "v1.engine.core:EngineCore.post_step",
        "one round trip less per step (0.7 of 15 ms on two cores)",
        "[a scheduler property](#a-scheduler-that-needs-no-draft-tokens)",
        "self model_executed",
    ),
)

WORKER = (
    Patch(
        "v1.worker.gpu.sample.prompt_logprob:CHUNK_SIZE",
        "prompt log-probabilities within a memory budget",
        "[a configuration field](#the-chunk-size-of-prompt-log-probabilities)",
    ),
    Patch(
        "v1.worker.gpu.model_runner:init_speculator",
        "our DFlash speculator",
        "[a speculator registry](#speculators-and-their-schedulers-by-name)",
        "vllm_config device req_states",
    ),
    Patch(
        "model_executor.models.bailing_moe:FusedMoEFactory",
        "LLaDA2.2's choice of experts, while the model is made",
        "a `custom_routing_function` of the configuration's",
    ),
)

CPU = (
    Patch(
        "config.vllm:VllmConfig.use_v2_model_runner",
        "model runner V2 without Triton",
        "[a platform's say in it](#model-runner-v2-where-a-platform-brings-its-own-kernels)",
        "self",
    ),
    Patch(
        "config.vllm:VllmConfig._validate_v2_model_runner",
        "the same, and our worker there",
        "the same",
        "self",
    ),
    Patch("v1.worker.gpu_worker:HAS_TRITON", "the same", "the same", since="0.33"),
    Patch(
        "triton_utils:triton.jit",
        "native kernels in the place of what it decorates",
        "[kernel dispatch that also covers functions](#kernel-dispatch-without-triton)",
    ),
    Patch("triton_utils:triton.next_power_of_2", "the stand-in for Triton lacks it", "the same"),
    Patch(
        "v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample",
        "verification of drafts without its six kernels",
        "the same",
    ),
    Patch(
        "compilation.decorators:_try_load_aot_compiled_fn",
        "a line in the log before a minute of compilation",
        "that line",
        "model aot_compilation_path",
    ),
    Patch(
        "distributed.device_communicators.shm_broadcast:SpinCondition.__init__",
        "no process that waits where the model computes (12 to 20% of a step on two cores)",
        "a setting",
        "self is_reader context notify_address busy_loop_s",
    ),
    Patch(
        "v1.executor.multiproc_executor:OMPProcessManager",
        "all cores of a small machine",
        "[no reserved core on small machines](#a-small-machines-cores)",
    ),
    Patch(
        "v1.engine.utils:CoreEngineProcManager.__init__",
        "starts that import vLLM once and not three times",
        "[a fork server](#one-import-for-all-processes)",
    ),
    Patch("v1.engine.utils:get_mp_context", "the same, during that call", "the same", ""),
    Patch("v1.executor.multiproc_executor:get_mp_context", "the same, for workers", "the same", ""),
    Patch(
        "platforms.cpu:CpuPlatform.get_device_communicator_cls",
        "data and tensor parallelism",
        "[both operations](#data-parallelism-on-cpus), and "
        "[no division by zero](#gathering-nothing-on-cpus)",
        "cls",
    ),
    Patch(
        "platforms.cpu:CpuPlatform.get_punica_wrapper",
        "adapters in batches",
        "[a row without an adapter](adapters.md)",
        "cls",
    ),
    Patch(
        "lora.model_manager:get_supported_lora_modules",
        "adapters of models with experts",
        "kernels of their adapters for CPUs",
        "model",
    ),
    Patch(
        "model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls",
        "expert parallelism; experts in bf16 twice as fast on AMD",
        "a `register_experts_kernel`",
        "backend",
    ),
    Patch(
        "model_executor.kernels.linear:_POSSIBLE_FP8_KERNELS[]",
        "FP8 linears on processors with AMX",
        "[a fix in PyTorch](fp8-on-amx.md)",
    ),
    Patch(
        "model_executor.kernels.linear:_POSSIBLE_INT8_KERNELS[]",
        "int8 linears in fp32 on processors with AMX",
        "a look at the model's type where `check_cpu_sgl_kernel` looks at the weights",
    ),
    Patch(
        "model_executor.kernels.linear:_POSSIBLE_KERNELS[]",
        "linears of 4-bit integers in half the time",
        "`register_linear_kernel` with an order",
    ),
)

PATCHES = (*EVERYWHERE, *SERVER, *ENGINE, *WORKER, *CPU)
ROOMS = {
    "In every process": EVERYWHERE,
    "In API servers": SERVER,
    "In engines": ENGINE,
    "In workers": WORKER,
    "On CPUs": CPU,
}
MOST = 43
"""Names that may be replaced. One more has to take the place of another."""
