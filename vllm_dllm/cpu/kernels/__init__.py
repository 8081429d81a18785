"""Native versions of vLLM's Triton kernels, by the kernel's full name.

A native kernel is named like the Triton kernel, and takes the grid and then the kernel's arguments.
"""

from collections.abc import Callable

import vllm

from vllm_dllm.cpu.compat.kernel_versions import adapt_dflash_kernel
from vllm_dllm.cpu.kernels import block_table, dflash, input_batch, sampling


def native_kernels(vllm_version: str) -> dict[str, Callable[..., None]]:
    """Returns our functions by the full name of the kernel that each replaces in `vllm_version`."""
    by_module: dict[str, tuple[Callable[..., None], ...]] = {
        "block_table": (block_table.compute_slot_mappings, block_table.gather_block_tables),
        "buffer_utils": (block_table.apply_write,),
        "input_batch": (
            input_batch.combine_sampled_and_draft_tokens,
            input_batch.expand_idx_mapping,
            input_batch.get_num_sampled_and_rejected,
            input_batch.post_update,
            input_batch.post_update_num_computed_tokens,
            input_batch.prepare_pos_seq_lens,
            input_batch.prepare_prefill_inputs,
        ),
        "sample.gumbel": (sampling.gumbel_sample, sampling.temperature),
        "sample.logprob": (sampling.ranks, sampling.topk_log_softmax),
        "sample.prompt_logprob": (sampling.prompt_logprobs_token_ids,),
        "spec_decode.dflash.speculator": (
            adapt_dflash_kernel(dflash.prepare_dflash_inputs, vllm_version),
        ),
        "spec_decode.rejection_sampler": (sampling.flatten_sampled, sampling.gather_draft_sampled),
        "structured_outputs": (sampling.apply_grammar_bitmask,),
    }
    return {
        f"vllm.v1.worker.gpu.{module}._{native.__name__}_kernel": native
        for module, natives in by_module.items()
        for native in natives
    }


NATIVE_KERNELS = native_kernels(vllm.__version__)
