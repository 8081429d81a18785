"""Places in vLLM that `compat/` takes hold of: what each must still say, as data.

`scripts/vllm_seams.py` looks for them in any copy of vLLM's sources: `tests/unit/compat` in the
installed one, `scripts/check_vllm.py VERSION` in any other. A seam that moved means: read the new
source, then change `compat/`.
"""

from vllm_dllm.compat.seams import engine, processes, streams, worker

SEAMS = [*engine.SEAMS, *worker.SEAMS, *processes.SEAMS, *streams.SEAMS]

SIGNATURES = {
    "compilation.decorators:_model_hash_key": "fn",
    "compilation.decorators:_try_load_aot_compiled_fn": "model aot_compilation_path",
    "config.scheduler:SchedulerConfig.get_scheduler_cls": "self",
    "config.vllm:VllmConfig._validate_v2_model_runner": "self",
    "config.vllm:VllmConfig.use_v2_model_runner": "self",
    "sampling_params:SamplingParams._validate_diffusion": "self model_config",
    "sampling_params:SamplingParams._validate_structured_outputs": (
        "self model_config structured_outputs_config tokenizer"
    ),
    "utils.diffusion:validate_diffusion_sampling_params": "params canvas_length vocab_size",
    "utils.ompmultiprocessing:OMPProcessManager.__init__": "self config",
    "utils.ompmultiprocessing:OMPProcessManager._get_autobind_cpu_ids": "self cpu_selector",
    "v1.core.sched.diffusion_scheduler:diffusion_canvas_width": "request canvas_length",
    "entrypoints.launchers.launcher:NoSignalServer.shutdown": "self sockets",
    "entrypoints.openai.chat_completion.serving:"
    "OpenAIServingChat.chat_completion_stream_generator": (
        "self request result_generator request_id model_name conversation tokenizer "
        "request_metadata chat_template_kwargs mm_token_counts"
    ),
    "entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator": (
        "self request result_generator request_id model_name conversation tokenizer "
        "request_metadata parser mm_token_counts"
    ),
    "entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator": (
        "self request engine_inputs result_generator request_id created_time model_name "
        "num_prompts tokenizer request_metadata"
    ),
    "entrypoints.openai.completion.serving:"
    "OpenAIServingCompletion.request_output_to_completion_response": (
        "self final_res_batch request request_id created_time model_name tokenizer request_metadata"
    ),
    "v1.engine.async_llm:AsyncLLM.abort": "self request_id internal",
    "v1.engine.async_llm:AsyncLLM.check_admission": "self n request_id",
    "v1.engine.async_llm:AsyncLLM.shutdown": "self timeout",
    "model_executor.layers.fused_moe.unquantized_fused_moe_method:"
    "UnquantizedFusedMoEMethod._setup_kernel": "self layer w13 w2",
    "model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "layer remove_weight",
    "tracing.otel:extract_trace_context": "headers",
    "tracing:instrument_manual": "span_name start_time end_time attributes context kind",
    "v1.engine.core:EngineCore.collective_rpc": "self method timeout args kwargs",
    "v1.engine.core:EngineCore.post_step": "self model_executed",
    "tokenizers.detokenizer_utils:convert_ids_list_to_tokens": "tokenizer token_ids",
    "v1.engine.input_processor:InputProcessor._validate_params": "self params supported_tasks",
    "v1.engine.input_processor:InputProcessor.resolve_watermarking": "self params",
    "v1.spec_decode.metrics:SpecDecodingProm.__init__": (
        "self speculative_config labelnames per_engine_labelvalues is_diffusion"
    ),
    "v1.spec_decode.metrics:SpecDecodingProm.observe": "self spec_decoding_stats engine_idx",
    "v1.structured_output:StructuredOutputManager._get_constraint_bounds": (
        "self request spec_tokens spec_tokens_committed"
    ),
    "v1.structured_output:StructuredOutputManager._get_reasoner": "self request",
    "v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs": (
        "self logits_fn hidden_states input_batch all_token_ids num_computed_tokens prompt_lens"
    ),
    "v1.worker.gpu.spec_decode:init_speculator": "vllm_config device req_states",
    "v1.worker.gpu.states:RequestState.remove_request": "self req_id",
}
"""Parameters of the functions that are replaced or called, by place. Those of overridden methods
are compared with the methods that override them."""
