"""Keeps the attention metadata of a step for the next one, while nothing they are made of changes.

A canvas is denoised in place, so from one denoising step to the next its request has the same rows,
keys and pages, and building metadata anew costs as much as a layer of a small model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_dllm.attention import WindowRules
from vllm_dllm.step.attn_requests import AttnRequests


class LatestMetadata:
    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = ()
        self._metadata: dict[str, Any] = {}

    def get_or_build(
        self,
        build: Callable[[], dict[str, Any]],
        requests: AttnRequests,
        causal: torch.Tensor,  # [N] int32
        window_rules: WindowRules,
        slot_mappings: torch.Tensor,  # [num_groups, num_tokens] int64
    ) -> dict[str, Any]:
        """The latest metadata if this step is made of the same, else new ones. All on the CPU.

        Metadata refer to the runner's buffers, so those must be the same memory, too. What slot
        mappings hold may differ: nothing is derived from it.
        """
        rules = [t for t in (window_rules.symmetric, window_rules.spans) if t is not None]
        tensors = (requests.seq_lens, causal, *rules, *requests.block_tables)
        made_of = (
            requests.query_start_loc_np.tobytes(),
            *_contents(tensors),
            *(t.data_ptr() for t in (*tensors, slot_mappings)),
        )
        if made_of != self._made_of:
            self._metadata = build()
            self._made_of = made_of
        return self._metadata


def _contents(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]
