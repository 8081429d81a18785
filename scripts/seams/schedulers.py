"""Seams in schedulers."""

from scripts.seams.seam import Seam

_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "v1.core.sched.async_scheduler:AsyncScheduler"

SEAMS = [
    # --- schedulers -------------------------------------------------------------------------------
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
        "statistics carry the counts of drafts, as a class that messages are decoded as",
        "v1.metrics.stats:SchedulerStats",
        "spec_decoding_stats: SpecDecodingStats | None = None",
    ),
    Seam(
        "statistics count accepted drafts by position",
        "v1.spec_decode.metrics:SpecDecodingStats.observe_draft",
        """for i in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[i] += 1""",
    ),
    Seam(
        "statistics count drafts by position",
        "v1.spec_decode.metrics:SpecDecodingStats.observe_draft",
        """for i in range(num_draft_tokens):
            self.num_draft_tokens_per_pos[i] += 1""",
    ),
    Seam(
        "a prefix in the cache is no longer than this",
        "v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        "max_cache_hit_length = request.num_tokens - 1",
    ),
    Seam(
        "processed images are kept where the configuration says",
        "multimodal.cache.factories:_get_cache_type",
        "return mm_config.mm_processor_cache_type",
    ),
    Seam(
        "processed images may be kept in the API server alone",
        "multimodal.cache.factories:processor_cache_from_config",
        'elif cache_type == "processor_only":',
    ),
    Seam(
        "metrics of drafts are made with their labels",
        "v1.metrics.loggers:PrometheusStatLogger.__init__",
        """self.spec_decoding_prom = self._spec_decoding_cls(
            vllm_config.speculative_config,
            labelnames,
            per_engine_labelvalues,
            is_diffusion=vllm_config.model_config.is_diffusion,
        )""",
    ),
    Seam(
        "metrics of drafts observe their counts",
        "v1.metrics.loggers:PrometheusStatLogger.record",
        """self.spec_decoding_prom.observe(
                    scheduler_stats.spec_decoding_stats, engine_idx
                )""",
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
    # --- shares of a step -----------------------------------------------------------------------
    Seam(
        "a running request may sit out a step",
        "v1.core.sched.scheduler:Scheduler.schedule",
        "if self.current_step < request.next_decode_eligible_step:",
    ),
    Seam(
        "steps are numbered as they are scheduled",
        "v1.core.sched.scheduler:Scheduler.schedule",
        "self.current_step += 1",
    ),
    Seam(
        "the ids of a request's answers",
        "v1.engine.parallel_sampling:ParentRequest.get_child_info",
        'child_req_id = f"{index}_{self.request_id}"',
    ),
    Seam(
        "the ids of a completion's prompts",
        "entrypoints.openai.completion.serving",
        'request_id_item = f"{request_id}-{i}"',
    ),
    Seam(
        "the random end of request ids",
        "v1.engine.input_processor:InputProcessor.assign_request_id",
        'request.request_id = f"{request.external_req_id}-{random_uuid():.8}"',
    ),
]
