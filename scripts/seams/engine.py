"""Seams in the engine process and the API server: configuration and requests."""

from scripts.seams.seam import Seam

_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "v1.core.sched.async_scheduler:AsyncScheduler"

SEAMS = [
    # --- admission and configuration --------------------------------------------------------------
    Seam(
        "a request's parameters are checked as the model's configuration says",
        "v1.engine.input_processor:InputProcessor._validate_params",
        """params.verify(
                self.model_config,
                self.speculative_config,
                self.structured_outputs_config,
                self.tokenizer,
            )""",
    ),
    Seam(
        "diffusion models have a check of their own",
        "v1.engine.input_processor:InputProcessor._validate_params",
        "if self.model_config.is_diffusion:",
    ),
    Seam(
        "parameters are copied after they are checked",
        "v1.engine.input_processor:InputProcessor.process_inputs",
        "sampling_params = params.clone()",
    ),
    Seam(
        "stop tokens and bad words are known after parameters are checked",
        "v1.engine.input_processor:InputProcessor.process_inputs",
        """sampling_params.update_from_generation_config(
                self.generation_config_fields,
                self.renderer.get_eos_token_id(),
            )
            if self.tokenizer is not None:
                sampling_params.update_from_tokenizer(self.tokenizer)""",
    ),
    Seam(
        "sampling parameters that other models take are refused",
        "sampling_params:SamplingParams._validate_diffusion",
        "if not model_config.is_diffusion:\n            return",
    ),
    Seam(
        "structured outputs are not looked at without their configuration",
        "sampling_params:SamplingParams._validate_structured_outputs",
        "if structured_outputs_config is None or self.structured_outputs is None:",
    ),
    Seam(
        "the configuration is adjusted by architecture",
        "config.vllm:VllmConfig.try_verify_and_update_config",
        "MODELS_CONFIG_MAP.get(architecture, None)",
    ),
    # --- images -----------------------------------------------------------------------------------
    Seam(
        "the scheduler asks how far a prompt with images goes in a step",
        f"{_SCHEDULER}.schedule",
        "self._try_schedule_encoder_inputs(",
    ),
    Seam(
        "an image is prepared, counted and named by steps of its own",
        "multimodal.processing.processor:BaseMultiModalProcessor._cached_apply_hf_processor",
        """mm_hashes = self._get_mm_hashes(inputs)""",
    ),
    Seam(
        "an image without a place in the prompt is an assertion of its own",
        "multimodal.processing.processor:BaseMultiModalProcessor._matched_updates_from_result",
        "assert update_idx is not None, (",
    ),
    Seam(
        "an image's tensors are made by a method of the processor",
        "multimodal.processing.processor:BaseMultiModalProcessor._apply_hf_processor",
        "mm_processed_data = self._apply_hf_processor_main(",
    ),
    # --- structured outputs -----------------------------------------------------------------------
    Seam(
        "the engine takes a grammar's backend from the request",
        "v1.structured_output:StructuredOutputManager.grammar_init",
        "structured_outputs._backend",
    ),
    Seam(
        "the scheduler checks what is emitted",
        f"{_SCHEDULER}.update_from_output",
        "if new_token_ids and not self.structured_output_manager.accept_tokens(",
    ),
    Seam(
        "the scheduler asks for masks",
        f"{_SCHEDULER}.get_grammar_bitmask",
        "if not scheduler_output.has_structured_output_requests:",
    ),
    Seam(
        "a scheduler that runs ahead waits for tokens that a grammar needs",
        f"{_ASYNC_SCHEDULER}._update_after_schedule",
        "scheduler_output.pending_structured_output_tokens |= (",
    ),
    Seam(
        "a grammar whose stop token is its tokenizer's",
        "v1.structured_output.backend_guidance:GuidanceGrammar.accept_tokens",
        "if self.ll_tokenizer.eos_token in tokens:",
    ),
    # --- requests over HTTP -----------------------------------------------------------------------
    *(
        Seam(
            f"{name} are answered by a generator that is made before the stream begins",
            f"entrypoints.openai.{module}.serving",
            call,
        )
        for name, module, call in (
            ("chats", "chat_completion", "generator = self.engine_client.generate("),
            ("completions", "completion", "generator = self.engine_client.generate("),
            ("responses", "responses", "generator = self._generate_with_builtin_tools("),
            ("steps of responses", "responses", "generator = self.engine_client.generate("),
        )
    ),
    *(
        Seam(
            f"the body of {path} is checked by a dependency",
            f"entrypoints.{module}.api_router",
            f"""@router.post(
    "{path}",
    dependencies=[Depends(validate_json_request)],""",
        )
        for path, module in (
            ("/v1/chat/completions", "openai.chat_completion"),
            ("/v1/chat/completions/batch", "openai.chat_completion"),
            ("/v1/completions", "openai.completion"),
            ("/v1/responses", "openai.responses"),
            ("/v1/messages", "anthropic"),
        )
    ),
    Seam(
        "a server's state has its configuration",
        "entrypoints.launchers.api_server.app_state:init_app_state",
        "state.vllm_config = vllm_config",
    ),
    Seam(
        "a server's state has the renderer of chats",
        "entrypoints.launchers.api_server.app_state:init_app_state",
        "state.online_renderer = OnlineRenderer(",
    ),
    Seam(
        "mistakes of clients of /v1/messages are logged",
        "entrypoints.anthropic.api_router:create_messages",
        'logger.exception("Error in create_messages: %s", e)',
    ),
    Seam(
        "the renderer knows the tool parser's class",
        "renderers.online_renderer:OnlineRenderer.render_chat",
        "tool_parser = self.parser.tool_parser_cls if self.parser is not None else None",
    ),
    Seam(
        "beam search begins with its parameters",
        "entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
        "self.llm_engine.input_processor.resolve_watermarking(params)",
    ),
    # --- spans of OpenTelemetry -----------------------------------------------------------------
    Seam(
        "a request's output has its trace headers",
        f"{_SCHEDULER}.update_from_output",
        "trace_headers=request.trace_headers,",
    ),
    Seam(
        "a request's span is in the context of its trace headers",
        "v1.engine.output_processor:OutputProcessor.do_tracing",
        "trace_context = extract_trace_context(engine_core_output.trace_headers)",
    ),
    Seam(
        "a span without trace headers is in the context of the process",
        "tracing.otel:manual_instrument_otel",
        "ctx = context if context is not None else _get_smart_context()",
    ),
    # --- limits of a request --------------------------------------------------------------------
    Seam(
        "all requests are processed by the method we replace",
        "v1.engine.async_llm:AsyncLLM.add_request",
        """request = self.input_processor.process_inputs(
                    request_id,
                    prompt,
                    params,
                    supported_tasks=await self.get_supported_tasks(),""",
    ),
    Seam(
        "the texts of the tokens of prompt log-probabilities",
        "v1.engine.logprobs:LogprobsProcessor._update_prompt_logprobs",
        "else convert_ids_list_to_tokens(",
    ),
]
