"""A target's paged keys and values, gathered and dequantised, against a loop over tokens."""

import pytest
import torch

from vllm_dllm.drafters.target_kv import PagedKV, read_target_kv

NUM_BLOCKS, BLOCK_SIZE, N, D = 15, 16, 2, 8
FP8 = torch.float8_e4m3fn

CACHES = {  # dtype of the cache, scales
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp8, a scale a tensor": (FP8, (torch.tensor([0.25]), torch.tensor([3.0]))),
    "fp8, a scale a head": (FP8, (torch.tensor([0.25, 2.0]), torch.tensor([3.0, 0.5]))),
}
LENGTHS = {
    "mixed": [1, 16, 33, 0, 47],
    "one token": [1],
    "none": [0, 0],
}


@pytest.mark.parametrize("transposed", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", CACHES)
def test_reads_what_a_loop_reads(kind: str, lengths: str, transposed: bool) -> None:
    dtype, scales = CACHES[kind]
    seq_lens = torch.tensor(LENGTHS[lengths], dtype=torch.int32)
    num_reqs, num_tokens = len(seq_lens), int(seq_lens.sum())
    shape = (2, NUM_BLOCKS, N, BLOCK_SIZE, D) if transposed else (2, NUM_BLOCKS, BLOCK_SIZE, N, D)
    raw = torch.randn(shape).to(dtype)
    keys, values = raw.transpose(2, 3) if transposed else raw
    key_scale, value_scale = scales or (None, None)
    block_table = torch.randperm(NUM_BLOCKS)[: 3 * num_reqs].view(num_reqs, 3).int()

    read = read_target_kv(
        PagedKV(keys, values, key_scale, value_scale),
        block_table,
        seq_lens,
        num_tokens,
        torch.float32,
    )
    assert read.keys.shape == read.values.shape == (num_tokens, N, D)
    assert read.keys.is_contiguous() and read.values.is_contiguous()
    assert read.start_loc.tolist() == [0, *seq_lens.cumsum(0).tolist()]
    row = 0
    for request, length in enumerate(seq_lens.tolist()):
        for position in range(length):
            block = block_table[request, position // BLOCK_SIZE]
            for ours, cache, scale in (
                (read.keys, keys, key_scale),
                (read.values, values, value_scale),
            ):
                expected = cache[block, position % BLOCK_SIZE].float()
                if scale is not None:
                    expected = expected * scale.expand(N)[:, None]
                assert torch.equal(ours[row], expected)
            row += 1
    assert row == num_tokens
