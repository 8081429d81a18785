"""What is said of a GPU that cannot do a case."""

import re

import pytest
import torch

from attention_kernels.support import FP8, Case, fa4_reason, triton_reason

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REASONS = {  # case: what Triton and FlashAttention-4 say of it
    Case((9, 0), 256, BF16, BF16): (None, None),
    Case((9, 0), 512, BF16, BF16): (None, r"head sizes .* on sm_90, got query with 512"),
    Case((9, 0), 96, BF16, BF16): (None, r"head sizes .* on sm_90, got query with 96"),
    Case((10, 0), 256, FP16, FP16): (None, None),
    Case((10, 0), 192, BF16, BF16): (None, r"head sizes .* on sm_100, got query with 192"),
    Case((10, 0), 512, BF16, BF16): (None, r"head sizes .* on sm_100, got query with 512"),
    Case((9, 0), 256, BF16, FP8): (None, r"a key_cache of the query's dtype torch.bfloat16"),
    Case((9, 0), 64, FP32, FP32): (None, r"float16 and bfloat16, got query with torch.float32"),
    Case((8, 0), 64, BF16, BF16): (None, r"9.x, 10.x\), got sm_80"),
    Case((8, 0), 64, BF16, FP8): (r"compute capability 8.9 and up, got sm_80", r"got sm_80"),
    Case((12, 0), 64, BF16, BF16): (None, r"got sm_120"),
    Case((7, 5), 64, FP16, FP16): (r"compute capability 8.0 and up, got sm_75", r"got sm_75"),
    Case((9, 0), 8, BF16, BF16): (r"head sizes from 16 to 512, got query with 8", r"head sizes .*"),
}


@pytest.mark.parametrize("case", REASONS, ids=str)
def test_says_what_a_chip_cannot_do(case: Case) -> None:

    for reason, expected in zip(
        (triton_reason(case), fa4_reason(case)), REASONS[case], strict=True
    ):
        if expected is None:
            assert reason is None
        else:
            assert reason is not None and re.search(expected, reason), reason
