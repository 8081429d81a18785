"""Compiles FlashAttention-4 with our mask for GPUs that are not there, and prints what its test
looks for. A process of its own: the chip is chosen by the environment, before the first import.

    python compile_fa4.py CAPABILITY '[[HEAD_SIZE, QUERY_HEADS_A_KEY_HEAD, PAGE], ...]'

First comes the first case with FlashAttention-4's own causal mask, then each case with ours.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

CAPABILITY, FOLDER = sys.argv[1], Path(tempfile.mkdtemp())
os.environ |= {
    "FLASH_ATTENTION_ARCH": f"sm_{CAPABILITY}",
    "CUTE_DSL_ARCH": f"sm_{CAPABILITY}a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "CUTE_DSL_KEEP": "ptx",
    "CUTE_DSL_DUMP_DIR": str(FOLDER),
}

import torch  # noqa: E402
from flash_attn.cute.interface import _flash_attn_fwd  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from attention_kernels import fa4_fwd  # noqa: E402
from attention_kernels.chunks import Chunks  # noqa: E402


def int32(*shape):
    return torch.empty(shape, dtype=torch.int32, device="cuda")


def tensors(head_size, group, page):
    half = dict(dtype=torch.bfloat16, device="cuda")
    query = torch.empty(512, 16, head_size, **half)
    # As vLLM allocates it: keys beside values, all tokens of a head together.
    cache = torch.empty(99, 16 // group, page, 2 * head_size, **half).transpose(1, 2)
    return query, *cache.split(head_size, dim=-1)


def compile_case(head_size, group, page):
    query, keys, values = tensors(head_size, group, page)
    chunks = Chunks(int32(6), int32(5), int32(5, 83), int32(5, 3))
    fa4_fwd.attend_chunks(query, keys, values, chunks, torch.empty_like(query), 0.1, 0.0)


def compile_causal(head_size, group, page):
    """The same but for the mask: FlashAttention-4's own."""
    query, keys, values = tensors(head_size, group, page)
    _flash_attn_fwd(
        query,
        keys,
        values,
        cu_seqlens_q=int32(6),
        seqused_k=int32(5),
        page_table=int32(5, 83),
        max_seqlen_q=256,
        max_seqlen_k=83 * page,
        softmax_scale=0.1,
        causal=True,
        out=torch.empty_like(query),
    )


def ptx_of(compile_one, case):
    """What was compiled anew, all together; its files have one name whatever the mask."""
    compile_one(*case)
    texts = []
    for path in FOLDER.glob("*.ptx"):
        texts.append(path.read_text())
        path.unlink()
    return "".join(texts)


if __name__ == "__main__":
    words = ("wgmma.mma_async", "tcgen05.mma", "ld.local", ".entry")
    cases = json.loads(sys.argv[2])
    with FakeTensorMode():
        texts = [ptx_of(compile_causal, cases[0]), *(ptx_of(compile_case, case) for case in cases)]
    shutil.rmtree(FOLDER)
    print(json.dumps([{word: text.count(word) for word in words} for text in texts]))
