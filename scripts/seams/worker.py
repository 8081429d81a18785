"""Seams in a worker: attention, the runner of a step, drafters."""

from scripts.seams.seam import Seam

_SPECULATOR = "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_RUNNER = "v1.worker.gpu.model_runner:GPUModelRunner"
_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_PROMPT_SCORES = "v1.worker.gpu.sample.prompt_logprob"
_LOGIT_BIAS = "v1.worker.gpu.sample.logit_bias"

SEAMS = [
    # --- operations and attention -----------------------------------------------------------------
    Seam(
        "the CPU kernel that writes keys and values",
        "_custom_ops:cpu_attn_reshape_and_cache",
        "torch.ops._C.cpu_attn_reshape_and_cache(",
    ),
    Seam(
        "FP8 linears take the first kernel of a list that can do them",
        "model_executor.kernels.linear",
        "_POSSIBLE_FP8_KERNELS",
    ),
    Seam(
        "experts take the first class of a list that supports them",
        "model_executor.layers.fused_moe.oracle.unquantized:select_unquantized_moe_backend",
        """for k_cls in backend_to_kernel_cls(backend):
            supported, reason = k_cls.is_supported_config(""",
    ),
    Seam(
        "CPUs' experts that are not quantised do not know whose they are",
        "model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",
        "            topk_weights,\n            topk_ids,\n            activation.value,",
    ),
    # --- adapters ---------------------------------------------------------------------------------
    Seam(
        "adapters: a request is taken to have one row of logits",
        "v1.worker.gpu.lora_utils:LoraState.make_lora_inputs",
        "prompt_lora_mapping = tuple(lora_ids)\n",
    ),
    Seam(
        "adapters: which embeddings they may change is the model's to say",
        "v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",
        "model.embedding_modules,",
    ),
    Seam(
        "adapters on CPUs: rows without one are given the last",
        "lora.punica_wrapper.punica_cpu:PunicaWrapperCPU._apply_shrink",
        "shrink_fun(y, x, w_t_all, scale)",
    ),
    Seam(
        "adapters: experts are among what they may change",
        "lora.model_manager:LoRAModelManager.__init__",
        "self.supported_lora_modules = get_supported_lora_modules(self.model)",
    ),
    Seam(
        "adapters: experts get other kernels for their sake",
        "model_executor.layers.fused_moe.layer",
        "is_lora_enabled=vllm_config.lora_config is not None",
    ),
    Seam("the C++ RMS norm", "_custom_ops:rms_norm", "torch.ops._C.rms_norm(out, input,"),
    Seam(
        "the cached choice of attention backend",
        "v1.attention.selector:get_attn_backend",
        "_cached_get_attn_backend(",
    ),
    Seam(
        "the choice of attention backend is cached",
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
    Seam(
        "FlashAttention-4 takes a causal flag per request",
        "vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
        "dynamic_causal=dynamic_causal,",
    ),
    Seam(
        "FlashAttention-4 takes a mask function",
        "vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
        "mask_mod=mask_mod,",
    ),
    # --- the worker and its runner ----------------------------------------------------------------
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
        "a step's output waits for all that the step has copied",
        "v1.worker.gpu.async_utils:AsyncOutput.__init__",
        "copy_stream.wait_stream(main_stream)",
    ),
    Seam(
        "a step's output holds what the engine gets",
        "v1.worker.gpu.async_utils:AsyncOutput.__init__",
        "self.model_runner_output = model_runner_output",
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
        "logits are made of these rows, which a model's state may add to before the forward",
        f"{_RUNNER}.sample",
        """sample_hidden_states = hidden_states[input_batch.logits_indices]
            logits = self.model.compute_logits(sample_hidden_states)""",
    ),
    Seam(
        "a model's state sees the batch before the forward",
        f"{_RUNNER}.execute_model",
        "**self.model_state.prepare_inputs(input_batch, self.req_states),",
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
        "chosen tokens are scored in chunks",
        f"{_PROMPT_SCORES}:PromptLogprobsWorker",
        "b = min(a + CHUNK_SIZE, hi)",
    ),
    Seam("a chunk of prompt scores has 1024 rows", _PROMPT_SCORES, "\nCHUNK_SIZE = 1024\n"),
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
        "the runner scores prompts",
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
        "the runner's prompt scores are an object of its own",
        f"{_RUNNER}.load_model",
        "self.prompt_logprobs_worker = PromptLogprobsWorker(",
    ),
    Seam(
        "the runner tells prompt scores about each new request",
        f"{_RUNNER}.add_requests",
        "self.prompt_logprobs_worker.add_request(\n",
    ),
    Seam(
        "the runner tells prompt scores about each request that leaves",
        f"{_RUNNER}._remove_request",
        "self.prompt_logprobs_worker.remove_request(req_id)",
    ),
    Seam(
        "a model may capture more, once the forward of steps is captured",
        f"{_RUNNER}.capture_model",
        "self.model_state.capture_inner_cudagraphs(",
    ),
    # --- memory while a server sleeps, and before it serves ---------------------------------------
    Seam(
        "memory that every sleep keeps, and what is allocated with the weights, which one does not",
        "device_allocator.sleep_mode_backend:CuMemBackend.suspend",
        'offload_tags: tuple[str, ...] = ("runtime", "cudagraph")',
    ),
    Seam(
        "the state of requests is allocated where the weights are",
        "v1.worker.gpu_worker:Worker.load_model",
        'self._maybe_get_memory_pool_context(tag="weights"),',
    ),
    # --- drafters ---------------------------------------------------------------------------------
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
    # --- the room of vLLM's sampler ---------------------------------------------------------------
    Seam("the sampler's limit of allowed tokens", _LOGIT_BIAS, "MAX_NUM_ALLOWED_TOKEN_IDS = 1024"),
    Seam("the sampler's limit of stop tokens", _LOGIT_BIAS, "MAX_NUM_STOP_TOKEN_IDS = 128"),
    Seam(
        "the sampler's limit of bad words",
        "v1.worker.gpu.sample.bad_words:BadWordsState.add_request",
        "max_total_tokens = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS",
    ),
]
