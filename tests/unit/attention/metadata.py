"""vLLM's description of a step, for the batches that attention is tested with."""

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from attention_kernels.testing import PagedBatch


def common_metadata(batch: PagedBatch) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=len(batch.query),
        max_query_len=int(batch.query_start_loc.diff().max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=torch.zeros(len(batch.query), dtype=torch.int64),
        causal=batch.causal,
    )
