"""Images in prompts (`attention_kernels.masks`), for vLLM's CPU kernel.

It knows causal and bidirectional requests. Seen from a row of an image, all keys up to the image's
end are visible, so the image's rows become a bidirectional request that ends there. Within a window
that holds the whole image, what the kernel's symmetric window lets them see is right as well.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dllm.attention import WindowRules
from vllm_dllm.cpu.attention.blocks import cut


@dataclass(frozen=True)
class Image:
    request: int  # that it has become
    rows: slice  # of the batch; fewer than its keys if the cache holds the first of them already
    first_key: int
    end: int  # of its keys


def cut_out_images(
    common: CommonAttentionMetadata, rules: WindowRules
) -> tuple[CommonAttentionMetadata, WindowRules, list[Image]]:
    """The same rows as requests that are all image or have none, and the images."""
    if rules.spans is None:
        return common, rules, []
    assert isinstance(common.causal, torch.Tensor) and rules.symmetric is not None
    num_reqs = common.num_reqs
    bounds = common.query_start_loc[: num_reqs + 1].numpy()
    num_rows = int(bounds[-1])
    spans = rules.spans[:num_rows].numpy()

    changes = np.flatnonzero((spans[1:] != spans[:-1]).any(axis=1)) + 1
    firsts = np.unique(np.concatenate((bounds[:-1], changes)))
    firsts = firsts[firsts < num_rows]  # where requests without rows begin
    row_ends = np.append(firsts[1:], num_rows)
    requests = np.searchsorted(bounds, firsts, side="right") - 1
    is_image = spans[firsts, 1] > 0
    rows_after = bounds[requests + 1] - row_ends
    seq_lens = common.seq_lens.numpy()[requests] - rows_after
    assert (seq_lens == spans[firsts, 1])[is_image].all(), "a step has the last row of its images"

    images = [
        Image(int(i), slice(int(firsts[i]), int(row_ends[i])), *map(int, spans[firsts[i]]))
        for i in np.flatnonzero(is_image)
    ]
    symmetric = np.where(is_image, 1, rules.symmetric.numpy()[requests])
    common = cut(
        common,
        requests,
        query_start_loc=np.append(firsts, num_rows),
        seq_lens=seq_lens,
        causal=np.where(is_image, 0, common.causal.numpy()[requests]),
    )
    return common, replace(rules, symmetric=torch.from_numpy(symmetric.astype(np.int32))), images
