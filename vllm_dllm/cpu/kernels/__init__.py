"""The native version of each of vLLM's kernels, by the kernel's full name.

A native kernel takes the grid and then the kernel's arguments.
"""

from collections.abc import Callable

import vllm

from vllm_dllm.cpu.compat.runner import dflash_inputs
from vllm_dllm.cpu.kernels import block_table, dflash, input_batch, sampling

_RUNNER = "vllm.v1.worker.gpu"


def native_kernels(vllm_version: str) -> dict[str, Callable[..., None]]:
    return {
        f"{_RUNNER}.block_table._compute_slot_mappings_kernel": block_table.compute_slot_mappings,
        f"{_RUNNER}.block_table._gather_block_tables_kernel": block_table.gather_block_tables,
        f"{_RUNNER}.buffer_utils._apply_write_kernel": block_table.apply_write,
        f"{_RUNNER}.input_batch._combine_sampled_and_draft_tokens_kernel": (
            input_batch.combine_sampled_and_draft_tokens
        ),
        f"{_RUNNER}.input_batch._expand_idx_mapping_kernel": input_batch.expand_idx_mapping,
        f"{_RUNNER}.input_batch._get_num_sampled_and_rejected_kernel": (
            input_batch.get_num_sampled_and_rejected
        ),
        f"{_RUNNER}.input_batch._post_update_kernel": input_batch.post_update,
        f"{_RUNNER}.input_batch._post_update_num_computed_tokens_kernel": (
            input_batch.post_update_num_computed_tokens
        ),
        f"{_RUNNER}.input_batch._prepare_pos_seq_lens_kernel": input_batch.prepare_pos_seq_lens,
        f"{_RUNNER}.input_batch._prepare_prefill_inputs_kernel": (
            input_batch.prepare_prefill_inputs
        ),
        f"{_RUNNER}.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
        f"{_RUNNER}.sample.gumbel._temperature_kernel": sampling.apply_temperature,
        f"{_RUNNER}.sample.logprob._ranks_kernel": sampling.ranks,
        f"{_RUNNER}.sample.logprob._topk_log_softmax_kernel": sampling.topk_log_softmax,
        f"{_RUNNER}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
            sampling.prompt_logprobs_token_ids
        ),
        f"{_RUNNER}.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": (
            dflash_inputs(dflash.prepare_dflash_inputs, vllm_version)
        ),
        f"{_RUNNER}.spec_decode.rejection_sampler._flatten_sampled_kernel": (
            sampling.flatten_sampled
        ),
        f"{_RUNNER}.spec_decode.rejection_sampler._gather_draft_sampled_kernel": (
            sampling.gather_draft_sampled
        ),
        f"{_RUNNER}.structured_outputs._apply_grammar_bitmask_kernel": (
            sampling.apply_grammar_bitmask
        ),
    }


NATIVE_KERNELS = native_kernels(vllm.__version__)
