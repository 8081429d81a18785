"""What `make test` tries of engines and servers: every feature once.

A feature is named beside the tests that try it: files, functions, or single cases, by the beginning
of their names. All other tests that start an engine or take long are for `make test-all`.
"""

FEATURES: dict[str, tuple[str, ...]] = {
    "a step equals transformers'": (
        "engine/test_one_step.py::test_prompts_around_the_window[plain-16]",
        "engine/test_one_step.py::test_prompts_around_the_window[both-64]",
        "engine/test_one_step.py::test_trained_checkpoint",
    ),
    "whole answers equal transformers'": (
        "engine/test_trajectories.py::test_trained_checkpoint[25-18]",
    ),
    "the next turn finds generated blocks": (
        "engine/test_committed_kv.py::test_next_turn_reuses_generated_blocks[in turn-False]",
        "engine/test_committed_kv.py::test_next_turn_reuses_generated_blocks[ahead-True]",
    ),
    "a step reads a large vocabulary in tiles": (
        "engine/test_large_vocabulary.py::test_best_guesses_are_the_references",
        "engine/test_large_vocabulary.py::test_a_seed_gives_the_same_canvases_in_any_batch[4]",
    ),
    "asynchronous scheduling": (
        "engine/test_spared_forwards.py::test_forwards_with_asynchronous_scheduling[3]",
    ),
    "steps in few launches": ("engine/test_fused_steps.py::test_every_step_is_fused[one canvas]",),
    "sampling parameters": ("engine/test_sampling_params.py",),
    "first canvases and predictions of a client": (
        "engine/test_predictions.py::test_a_right_prediction_saves_steps",
    ),
    "grammars": (
        "engine/test_grammars.py::test_every_kind_is_kept",
        "engine/test_reasoning.py::test_the_answer_comes_behind_the_reasoning",
    ),
    "masked families": (
        "engine/test_masked.py::test_decisions[SDAR-4-static]",
        "engine/test_masked.py::test_decisions[MoE-4-dynamic]",
        "engine/test_masked.py::test_decisions[LLaDA2-4-edited]",
        "engine/test_masked.py::test_decisions[LLaDA2.2-4-warm]",
        "engine/test_masked.py::test_decisions[Nemotron-4-dynamic]",
        "engine/test_masked.py::test_decisions[Fast-dLLM-4-dynamic]",
        "engine/test_masked.py::test_log_probabilities_at_the_moment_of_unmasking[Nemotron-warm-False]",
        "engine/test_verified.py::test_decisions[few tokens]",
        "engine/test_blocks_in_flight.py::test_decisions[in turn-SDAR",
        "engine/test_verified_blocks.py::test_decisions[SDAR]",
        "engine/test_masked_refusals.py::test_refused_servers",
        "engine/test_masked_refusals.py::test_refused_variants",
    ),
    "images and videos": (
        "engine/test_images.py::test_one_step[16-plain]",
        "engine/test_images.py::test_one_step[16-both]",
    ),
    "quantised checkpoints": (
        "engine/test_quantized.py::test_one_step_of_the_shipped[FP8_DYNAMIC]",
    ),
    "probabilities of a few tokens": (
        "server/test_scores.py::test_decisions_have_the_references_probabilities",
    ),
    "drafters": (
        "engine/test_drafters.py::test_same_answers_as_the_target_alone",
        "engine/test_drafters.py::test_acceptance_length",
    ),
    "aborts": ("engine/test_spared_forwards.py::test_no_step_after_an_abort",),
    "adapters": (
        "engine/test_adapters.py::test_mixed_batch_is_answered_as_by_merged_checkpoints[SDAR]",
    ),
    "a server and its clients": (
        "server/test_openai.py",
        "server/test_bad_input.py",
        "server/test_predictions.py",
        "server/test_structured_outputs.py::test_response_format",
        "server/test_structured_outputs.py::test_bad_grammars",
        "server/test_documented.py::test_request",
        "server/test_documented.py::test_client_program",
    ),
    "tool calls": (
        "server/test_gemma_tool_calls.py::test_some_call_must_come",
        "server/test_gemma_tool_calls.py::test_streamed_is_the_same",
    ),
    "watched canvases and metrics": ("server/test_canvases.py", "server/test_metrics.py"),
    "errors of a start": ("server/test_startup_errors.py::test_a_server_says_it_last",),
}

TRIED = tuple(f"tests/{name}" for names in FEATURES.values() for name in names)
