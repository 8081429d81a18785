"""Places in vLLM that `compat/` takes hold of: what each must still say, as data.

`tools/vllm_seams.py` looks for them in any copy of vLLM's sources: `tests/unit/compat` in the
installed one, `scripts/check_vllm.py VERSION` in any other. A seam that moved means: read the new
source, then change `compat/`.
"""

from dataclasses import dataclass

from vllm_dllm.compat.log_lines import ENGINE_FAILED, FAILED_START, NO_TRITON


@dataclass(frozen=True)
class Seam:
    what: str
    place: str
    """module:names below `vllm`, or the module alone."""
    line: str
    """What stands there and makes it matter."""
    since: str = "0"
    until: str | None = None
    """The first version that does not say so any more."""


_SPECULATOR = "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_RUNNER = "v1.worker.gpu.model_runner:GPUModelRunner"
_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "v1.core.sched.async_scheduler:AsyncScheduler"
_PROMPT_SCORES = "v1.worker.gpu.sample.prompt_logprob"

SEAMS = [
    # --- operations and attention ---------------------------------------------------------------
    Seam(
        "the CPU kernel that writes keys and values",
        "_custom_ops:cpu_attn_reshape_and_cache",
        "torch.ops._C.cpu_attn_reshape_and_cache(",
    ),
    Seam("the C++ RMS norm", "_custom_ops:rms_norm", "torch.ops._C.rms_norm(out, input,"),
    Seam(
        "the cached choice of attention backend",
        "v1.attention.selector:get_attn_backend",
        "_cached_get_attn_backend(",
    ),
    Seam(
        "the cache can be cleared",
        "v1.attention.selector",
        "@cache\ndef _cached_get_attn_backend",
    ),
    Seam(
        "extensions have one backend name that every process knows",
        "v1.attention.backends.registry:AttentionBackendEnum",
        "CUSTOM = None",
    ),
    Seam(
        "the GPU platform asks the chosen backend's class",
        "platforms.cuda:_get_attn_backend_class",
        ".get_class()",
    ),
    Seam(
        "the CPU platform names its backend by the registry",
        "platforms.cpu:CpuPlatform.get_attn_backend_cls",
        "return AttentionBackendEnum.CPU_ATTN.get_path()",
    ),
    Seam(
        "a CPU worker's kernels for the cache",
        "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers",
        "layer.isa = self.isa",
    ),
    # --- admission and configuration ------------------------------------------------------------
    Seam(
        "the admission check of diffusion requests",
        "v1.engine.input_processor:InputProcessor",
        "validate_diffusion_sampling_params(",
    ),
    Seam(
        "all of a request's parameters are checked at once",
        "v1.engine.input_processor:InputProcessor.process_inputs",
        "watermarking = self._validate_params(params, supported_tasks)",
    ),
    Seam(
        "stop tokens and bad words are known after the check",
        "v1.engine.input_processor:InputProcessor.process_inputs",
        """sampling_params.update_from_generation_config(
                self.generation_config_fields,
                self.renderer.get_eos_token_id(),
            )
            if self.tokenizer is not None:
                sampling_params.update_from_tokenizer(self.tokenizer)""",
    ),
    Seam(
        "the check of diffusion sampling parameters",
        "sampling_params:SamplingParams.verify",
        "self._validate_diffusion(model_config)",
    ),
    Seam(
        "configurations by architecture",
        "config.vllm:VllmConfig.try_verify_and_update_config",
        "MODELS_CONFIG_MAP.get(architecture, None)",
    ),
    # --- requests over HTTP ---------------------------------------------------------------------
    Seam(
        "chats are rendered by the method we replace",
        "entrypoints.openai.chat_completion.serving",
        "return await self.online_renderer.render_chat(request)",
    ),
    Seam(
        "completions, too",
        "entrypoints.openai.completion.serving",
        "self.online_renderer.render_completion(request)",
    ),
    Seam(
        "and responses",
        "entrypoints.openai.responses.serving",
        "self.online_renderer.render_responses(",
    ),
    Seam(
        "a tool parser is known by its class",
        "renderers.online_renderer:OnlineRenderer.render_chat",
        "tool_parser = self.parser.tool_parser_cls if self.parser is not None else None",
    ),
    Seam(
        "beam search begins with its parameters",
        "entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
        "self.llm_engine.input_processor.resolve_watermarking(params)",
    ),
    # --- schedulers -----------------------------------------------------------------------------
    Seam(
        "vLLM names its diffusion schedulers where nobody has named one",
        "config.vllm:VllmConfig.__post_init__",
        "and self.scheduler_config.scheduler_cls is None",
    ),
    Seam(
        "the engine asks the configuration for its scheduler",
        "v1.engine.core:EngineCore.__init__",
        "Scheduler = vllm_config.scheduler_config.get_scheduler_cls()",
    ),
    Seam(
        "the engine calls what is named",
        "v1.engine.core:EngineCore.__init__",
        "self.scheduler: SchedulerInterface = Scheduler(\n            vllm_config=vllm_config,",
    ),
    Seam(
        "a scheduler that runs ahead leaves drafts alone that are narrow enough",
        "v1.core.sched.diffusion_scheduler:DiffusionAsyncScheduler.schedule",
        """width = diffusion_canvas_width(request, self.num_spec_tokens)
            # The placeholders are as wide as the served canvas.
            if len(request.spec_token_ids) > width:""",
    ),
    Seam(
        "the scheduler counts a step after building it",
        f"{_SCHEDULER}.schedule",
        "self._update_after_schedule(scheduler_output)",
    ),
    Seam(
        "the scheduler takes a request's tokens",
        f"{_SCHEDULER}.update_from_output",
        "new_token_ids, stopped = self._update_request_with_output(",
    ),
    Seam(
        "tokens that have arrived are on their way no more, after our hook",
        f"{_ASYNC_SCHEDULER}._update_request_with_output",
        "request.num_output_placeholders -= len(new_token_ids)",
        until="0.33",
    ),
    Seam(
        "tokens that have arrived are on their way no more, before our hook",
        f"{_SCHEDULER}._update_request_with_output",
        "request.num_output_placeholders -= num_new_tokens",
        since="0.33",
    ),
    Seam(
        "blocks are cached up to what is on its way",
        f"{_ASYNC_SCHEDULER}._update_request_with_output",
        "request, request.num_computed_tokens - request.num_output_placeholders",
        until="0.33",
    ),
    Seam(
        "blocks are cached up to what is on its way",
        f"{_SCHEDULER}.update_from_output",
        "request.num_computed_tokens - request.num_in_flight_tokens,",
        since="0.33",
    ),
    Seam(
        "the cache blocks to be zeroed",
        f"{_SCHEDULER}.schedule",
        "new_block_ids_to_zero=self._get_new_block_ids_to_zero(),",
    ),
    Seam(
        "the scheduler says how many tokens a request has got",
        f"{_SCHEDULER}._make_cached_request_data",
        "req.num_output_tokens + req.num_output_placeholders",
    ),
    Seam(
        "the scheduler takes drafts",
        f"{_SCHEDULER}.update_draft_token_ids",
        "request.spec_token_ids = self.structured_output_manager.validate_tokens(",
    ),
    Seam(
        "a scheduler that runs ahead shares one list of drafts",
        f"{_ASYNC_SCHEDULER}._update_after_schedule",
        "request.spec_token_ids = self._spec_token_placeholders",
    ),
    Seam(
        "the scheduler counts verified drafts",
        f"{_SCHEDULER}.update_from_output",
        "spec_decoding_stats = self.make_spec_decoding_stats(",
    ),
    Seam(
        "the scheduler frees a request",
        f"{_SCHEDULER}.finish_requests",
        "self._free_request(request",
    ),
    Seam(
        "after a step the engine only asks for draft tokens",
        "v1.engine.core:EngineCore.post_step",
        """if self.check_for_draft_tokens and not self.async_scheduling and model_executed:
            draft_token_ids = self.model_executor.take_draft_token_ids()
            if draft_token_ids is not None:
                self.scheduler.update_draft_token_ids(draft_token_ids)""",
    ),
    # --- the worker and its runner --------------------------------------------------------------
    Seam(
        "the GPU platform keeps a worker that was named before",
        "platforms.cuda:CudaPlatformBase.check_and_update_config",
        'if parallel_config.worker_cls == "auto":',
    ),
    Seam(
        "the worker runs a step",
        "v1.worker.gpu_worker:Worker.execute_model",
        "output = self.model_runner.execute_model(",
    ),
    Seam(
        "the runner counts what is prefilled of the requests that it knows",
        f"{_RUNNER}.update_requests",
        """np.minimum(
            self.req_states.num_computed_tokens_np,
            self.req_states.prefill_len.np,""",
    ),
    Seam(
        "a prefill lasts to prefill_len",
        f"{_RUNNER}.gather_batch_req_state",
        "is_prefilling_np = num_computed_prefill_tokens_np < prefill_len_np",
    ),
    Seam(
        "prefill_len is what kernels read after a copy",
        "v1.worker.gpu.states:RequestState.apply_staged_writes",
        "self.prefill_len.copy_to_uva()",
    ),
    Seam(
        "prompts are scored in chunks",
        f"{_PROMPT_SCORES}:compute_prompt_logprobs_with_chunking",
        """for start_idx in range(0, prompt_token_ids.shape[0], CHUNK_SIZE):
        end_idx = start_idx + CHUNK_SIZE""",
    ),
    Seam(
        "chosen tokens, too",
        f"{_PROMPT_SCORES}:PromptLogprobsWorker",
        "b = min(a + CHUNK_SIZE, hi)",
    ),
    Seam("in chunks of so many rows", _PROMPT_SCORES, "\nCHUNK_SIZE = 1024\n"),
    Seam(
        "a request with one token left is padded with drafts",
        f"{_SCHEDULER}.schedule",
        "padded_num_tokens = 1 + self.num_spec_tokens",
    ),
    Seam(
        "prompts are scored to the end of what is scheduled",
        f"{_PROMPT_SCORES}:PromptLogprobsWorker.compute_prompt_logprobs",
        """end_idx = query_start_loc_np[i + 1]
            assert start_idx < end_idx, (
                f"start_idx ({start_idx}) >= end_idx ({end_idx})"
            )
            if not req_is_prompt_chunked:
                end_idx -= 1""",
    ),
    Seam(
        "the runner scores prompts by",
        f"{_RUNNER}.sample_tokens",
        """self.prompt_logprobs_worker.compute_prompt_logprobs(
            self.model.compute_logits,
            hidden_states,
            input_batch,
            self.req_states.all_token_ids.gpu,
            self.req_states.num_computed_tokens.gpu,
            self.req_states.prompt_len.np,
        )""",
    ),
    Seam(
        "the runner frees a slot",
        f"{_RUNNER}._remove_request",
        "req_idx = self.req_states.remove_request(req_id)",
    ),
    Seam(
        "tokens of a request that comes are written to its slot",
        "v1.worker.gpu.states:RequestState.add_request",
        "self.all_token_ids.stage_write(req_idx, 0, all_token_ids)",
    ),
    # --- drafters -------------------------------------------------------------------------------
    Seam(
        "the runner makes its speculator",
        f"{_RUNNER}.__init__",
        "self.speculator = init_speculator(",
    ),
    Seam(
        "the runner knows how many tokens to draft before it drafts",
        f"{_RUNNER}.sample_tokens",
        "num_spec_tokens = self.execute_model_state.num_spec_tokens_to_schedule",
    ),
    Seam(
        "the runner drafts nothing where the scheduler says so",
        f"{_RUNNER}.execute_model",
        "0 if skip_drafts else scheduler_output.num_spec_tokens_to_schedule",
        since="0.33",
    ),
    Seam(
        "the speculator stores the context before it drafts",
        f"{_SPECULATOR}.propose",
        "self._precompute_context_kv(0, num_target_tokens, dummy_run)",
    ),
    Seam(
        "a captured draft stores it too",
        f"{_SPECULATOR}._prepare_graph_forward",
        "self._precompute_context_kv(0, self._num_graph_context_tokens(num_reqs))",
        until="0.33",
    ),
    Seam(
        "a captured draft stores it too",
        f"{_SPECULATOR}._prepare_graph_forward",
        "self._precompute_context_kv(0, num_context)",
        since="0.33",
    ),
    Seam(
        "a step has slots for the drafter's cache, too",
        f"{_RUNNER}.prepare_attn",
        "self.block_tables.compute_slot_mappings(",
    ),
    Seam(
        "the sampler of drafts verifies them",
        "v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
        "sampled, num_sampled = rejection_sample(",
    ),
    Seam(
        "drafted positions have seeds of their own",
        "v1.worker.gpu.sample.gumbel:gumbel_block_argmax",
        "if logits_cache_ptr is not None:\n        seed = spec_step_seed(seed, col)",
        since="0.33",
    ),
    # --- processes start, and end ---------------------------------------------------------------
    Seam(
        "a server makes its socket",
        "entrypoints.launchers.launcher:setup_server",
        "sock = create_server_socket(sock_addr, reuse_port=reuse_port)",
    ),
    Seam(
        "plugins are loaded before a server's arguments are parsed",
        "engine.arg_utils:AsyncEngineArgs.add_cli_args",
        "load_general_plugins()",
    ),
    Seam(
        "a server's arguments become an engine's configuration",
        "entrypoints.launchers.api_server.entry:build_async_engine_client_from_engine_args",
        "vllm_config = engine_args.create_engine_config(",
    ),
    Seam(
        "a worker that cannot start",
        "v1.executor.multiproc_executor:WorkerProc",
        f'logger.exception("{FAILED_START["vllm.v1.executor.multiproc_executor"]}")',
    ),
    Seam(
        "an engine that cannot start",
        "v1.engine.core:EngineCoreProc.run_engine_core",
        f'logger.exception("{FAILED_START["vllm.v1.engine.core"]}")',
    ),
    Seam("its parent knows no reason", "v1.engine.utils", ENGINE_FAILED),
    Seam(
        "Triton has no backend for CPUs",
        "triton_utils.importing",
        NO_TRITON["vllm.triton_utils.importing"],
    ),
    Seam("and is taken for absent", "platforms.cpu", NO_TRITON["vllm.platforms.cpu"]),
    Seam(
        "a server freezes its objects",
        "entrypoints.launchers.utils.server_utils",
        "freeze_gc_heap()",
    ),
    Seam(
        "plugins of the platform are asked before Transformers is imported",
        "config.model",
        """from vllm.platforms import CpuArchEnum, current_platform
from vllm.tasks import PoolingTask, ScoreType, SupportedTask
from vllm.transformers_utils.config import (""",
    ),
    Seam(
        "the command line asks for the version of `vllm`",
        "entrypoints.cli.main:main",
        'importlib.metadata.version("vllm")',
    ),
    # --- CPUs without Triton --------------------------------------------------------------------
    Seam(
        "the choice of model runner",
        "v1.worker.gpu_worker:Worker.__init__",
        "self.use_v2_model_runner = vllm_config.use_v2_model_runner",
    ),
    Seam(
        "the check of the choice",
        "config.vllm:VllmConfig.__post_init__",
        "self._validate_v2_model_runner()",
    ),
    Seam(
        "what that check wants",
        "config.vllm:VllmConfig._validate_v2_model_runner",
        "if not HAS_TRITON:",
        until="0.33",
    ),
    Seam(
        "the worker wants it instead",
        "v1.worker.gpu_worker:Worker.__init__",
        "if self.use_v2_model_runner and not HAS_TRITON:",
        since="0.33",
    ),
    Seam(
        "the worker class is final when the check comes",
        "platforms.cpu:CpuPlatform.check_and_update_config",
        'parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"',
    ),
    Seam(
        "the CPU worker makes its runner in init_device",
        "v1.worker.cpu_worker:CPUWorker.init_device",
        "if self.use_v2_model_runner:",
    ),
    Seam(
        "the CPU worker warms kernels up, unless told not to",
        "v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        "if self.use_v2_model_runner and kernel_config.enable_jit_warmup:",
        since="0.33",
    ),
    Seam("the stand-ins for Triton", "triton_utils", "triton = TritonPlaceholder()"),
    Seam("the stand-in for its language", "triton_utils", "tl = TritonLanguagePlaceholder()"),
    Seam(
        "their constexpr",
        "triton_utils.importing:TritonLanguagePlaceholder.__init__",
        "self.constexpr =",
    ),
    # --- compiled models on CPUs ----------------------------------------------------------------
    Seam(
        "a compiled model is loaded, then completed",
        "compilation.decorators:_try_load_aot_compiled_fn",
        "loaded_fn._artifacts.compiled_fn.finalize_loading(model.vllm_config)",
    ),
    Seam(
        "a compiled model is looked for by a key",
        "compilation.decorators:_support_torch_compile",
        "factors.append(_model_hash_key(self.forward))",
    ),
    Seam(
        "what cannot be loaded is compiled",
        "compilation.decorators:_support_torch_compile",
        """loaded_fn = _try_load_aot_compiled_fn(self, aot_compilation_path)
                if loaded_fn is not None:""",
    ),
    Seam(
        "on CPUs Inductor compiles the model in one piece",
        "platforms.cpu:CpuPlatform.check_and_update_config",
        "compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE",
    ),
    Seam(
        "when a worker that does not answer is said to hang",
        "distributed.device_communicators.shm_broadcast",
        "VLLM_RINGBUFFER_WARNING_INTERVAL = envs.VLLM_RINGBUFFER_WARNING_INTERVAL",
    ),
    # --- cores and threads of CPU workers -------------------------------------------------------
    Seam(
        "the cores of CPU workers",
        "utils.ompmultiprocessing:OMPProcessManager._parse_omp_threads_bind_env",
        """cpu_list, reserve_list = self._get_autobind_cpu_ids(
                    lambda cpus: cpus[-1:]
                )""",
    ),
    Seam(
        "are chosen when the workers are started",
        "v1.executor.multiproc_executor:MultiprocExecutor._init_executor",
        "cpu_omp_manager = OMPProcessManager(self.vllm_config)",
    ),
    Seam(
        "how many are reserved",
        "utils.ompmultiprocessing:OMPProcessManager._get_autobind_cpu_ids",
        "if total_cpu_num <= self.reserve_cpu_num:",
    ),
    Seam(
        "the cores that a quota leaves",
        "utils.torch_utils:available_cpu_count",
        "limit = _cgroup_cpu_limit()",
    ),
    Seam(
        "the threads of a worker that has loaded its model",
        "v1.worker.gpu_worker:Worker.load_model",
        "set_torch_threads_for_runtime()",
    ),
]

SIGNATURES = {
    "compilation.decorators:_model_hash_key": "fn",
    "compilation.decorators:_try_load_aot_compiled_fn": "model aot_compilation_path",
    "config.scheduler:SchedulerConfig.get_scheduler_cls": "self",
    "config.vllm:VllmConfig._validate_v2_model_runner": "self",
    "config.vllm:VllmConfig.use_v2_model_runner": "self",
    "sampling_params:SamplingParams._validate_diffusion": "self model_config",
    "utils.diffusion:validate_diffusion_sampling_params": "params canvas_length vocab_size",
    "utils.ompmultiprocessing:OMPProcessManager.__init__": "self config",
    "utils.ompmultiprocessing:OMPProcessManager._get_autobind_cpu_ids": "self cpu_selector",
    "v1.core.sched.diffusion_scheduler:diffusion_canvas_width": "request canvas_length",
    "v1.engine.core:EngineCore.post_step": "self model_executed",
    "v1.engine.input_processor:InputProcessor._validate_params": "self params supported_tasks",
    "v1.engine.input_processor:InputProcessor.resolve_watermarking": "self params",
    "v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs": (
        "self logits_fn hidden_states input_batch all_token_ids num_computed_tokens prompt_lens"
    ),
    "v1.worker.gpu.spec_decode:init_speculator": "vllm_config device req_states",
    "v1.worker.gpu.states:RequestState.remove_request": "self req_id",
}
"""Parameters of the functions that are replaced or called, by place. Those of overridden methods
are compared with the methods that override them."""
