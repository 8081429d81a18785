"""Places in vLLM that `vllm_dllm/compat` depends on, and what each must still say, as data.

`scripts/vllm_seams.py` looks for them in any copy of vLLM's sources: `tests/unit/compat` in the
installed one, `scripts/check_vllm.py VERSION` in any other. If a seam has moved, read the new
source, then change `compat/`.
"""

from scripts.seams import engine, processes, schedulers, streams, worker

SEAMS = [*engine.SEAMS, *schedulers.SEAMS, *worker.SEAMS, *processes.SEAMS, *streams.SEAMS]

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
"""Parameters of functions that we call, by place. Those of functions that we replace are in
`patches`; overridden methods are compared with ours."""
