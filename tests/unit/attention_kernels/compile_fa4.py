"""Compiles FlashAttention-4 with our mask for GPUs that are not there, and prints what its test
looks for. A process of its own: the chip is chosen by the environment, before the first import.

    python compile_fa4.py CAPABILITY HEAD_SIZE QUERY_HEADS_A_KEY_HEAD PAGE

Our mask comes first, then another mask with the same tensors, then ours again, then that of images.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

CAPABILITY, FOLDER = sys.argv[1], Path(tempfile.mkdtemp())
os.environ |= {
    "FLASH_ATTENTION_ARCH": f"sm_{CAPABILITY}",
    "CUTE_DSL_ARCH": f"sm_{CAPABILITY}a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "CUTE_DSL_KEEP": "ptx",
    "CUTE_DSL_DUMP_DIR": str(FOLDER),
}

import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Int32  # noqa: E402
from flash_attn.cute.utils import scalar_to_ssa  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from attention_kernels import fa4_fwd  # noqa: E402
from attention_kernels.batch import Batch  # noqa: E402
from attention_kernels.chunks import CHUNK, Chunks  # noqa: E402


def int32(*shape):
    return torch.empty(shape, dtype=torch.int32, device="cuda")


def batch_of(head_size, group, page):
    half = dict(dtype=torch.bfloat16, device="cuda")
    query = torch.empty(512, 16, head_size, **half)
    # As vLLM allocates it: keys beside values, all tokens of a head together.
    cache = torch.empty(99, 16 // group, page, 2 * head_size, **half).transpose(1, 2)
    requests = (int32(4, 83), int32(5), *(int32(4) for _ in range(3)))
    return Batch(query, *cache.split(head_size, dim=-1), *requests)


@cute.jit
def another_mask(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    slope = scalar_to_ssa(aux_tensors[0][batch_idx[0], 0], Int32)
    return kv_idx >= slope * q_idx


def ptx_with(mask, batch, images=None):
    """What is compiled anew for it."""
    chunks = Chunks(int32(6), int32(5), int32(5, 83), int32(5, 3), images)
    with patch.object(fa4_fwd, "band_mask", mask):
        output = torch.empty_like(batch.query)
        fa4_fwd.attend_chunks(batch, chunks, output=output, scale=0.1, softcap=0.0)
    texts = []
    for path in FOLDER.glob("*.ptx"):  # of one name, whatever the mask
        texts.append(path.read_text())
        path.unlink()
    return "".join(texts)


if __name__ == "__main__":
    words = ("wgmma.mma_async", "tcgen05.mma", "ld.local", "ld.global.nc", ".entry")
    masks = (fa4_fwd.band_mask, another_mask, fa4_fwd.band_mask)
    with FakeTensorMode():
        batch = batch_of(*map(int, sys.argv[2:]))
        texts = [ptx_with(mask, batch) for mask in masks]
        images = int32(5, CHUNK, 2)
        texts.append(ptx_with(fa4_fwd.band_mask, batch, images))
    shutil.rmtree(FOLDER)
    print(json.dumps([{word: text.count(word) for word in words} for text in texts]))
