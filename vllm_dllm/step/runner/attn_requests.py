"""The requests of a step as attention sees them, and a cache of the metadata made of them.

A request whose canvas shares a forward with the prompt or the block before it becomes two: the rows
of known tokens, causal, and the canvas rows, which see those and themselves. Both have the pages of
the one request, and keys are written before any are read, so every backend with a causal flag for
each request can run them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.attention import WindowRules
from vllm_dllm.step.slots import Index, slice_if_consecutive


@dataclass(frozen=True)
class AttnRequests:
    """The N requests of a step as attention sees them: one or two for each request of the batch."""

    is_prompt: np.ndarray  # [N] bool, requests whose rows are a prompt's or an emitted block's
    query_start_loc_np: np.ndarray  # [N + 1] int32
    query_start_loc: torch.Tensor  # [N + 1] int32
    seq_lens: torch.Tensor  # [N] int32, tokens up to each part's last row
    slots: Index  # [N]
    block_tables: Sequence[torch.Tensor]  # for each KV cache group, [N, max_blocks] int32
    max_query_len: int  # rows of the longest request

    @classmethod
    def build(
        cls, batch: InputBatch, block_tables: Sequence[torch.Tensor], device: torch.device
    ) -> "AttnRequests":
        """Builds the requests of a batch. One with both a canvas and known tokens becomes two."""
        num_canvas = batch.num_draft_tokens_per_req
        if num_canvas is not None and (batch.is_prefilling_np & (num_canvas > 0)).any():
            return cls._split_canvases(batch, num_canvas, block_tables, device)
        return cls.one_per_request(batch, block_tables)

    @classmethod
    def one_per_request(
        cls, batch: InputBatch, block_tables: Sequence[torch.Tensor]
    ) -> "AttnRequests":
        """Builds the requests of a batch, none of which is split. The known rows and the canvas
        rows of one request must follow the same rule of visibility."""
        num_reqs = batch.num_reqs
        return cls(
            is_prompt=batch.is_prefilling_np,
            query_start_loc_np=batch.query_start_loc_np[: num_reqs + 1],
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            seq_lens=batch.seq_lens[:num_reqs],
            slots=slice_if_consecutive(
                batch.idx_mapping_np[:num_reqs], batch.idx_mapping[:num_reqs]
            ),
            block_tables=block_tables,
            max_query_len=batch.max_query_len or int(batch.num_scheduled_tokens.max()),
        )

    @classmethod
    def _split_canvases(
        cls,
        batch: InputBatch,
        num_canvas: np.ndarray,  # [num_reqs] int32, canvas rows of each request
        block_tables: Sequence[torch.Tensor],
        device: torch.device,
    ) -> "AttnRequests":
        """Builds the requests of a batch, two for each that has both known rows and a canvas."""
        num_prompt = np.where(batch.is_prefilling_np, batch.num_scheduled_tokens - num_canvas, 0)
        # [num_reqs, 2]: how many rows of known tokens and of a canvas a request has.
        lengths = np.stack((num_prompt, num_canvas), axis=1)
        following = np.stack((num_canvas, np.zeros_like(num_canvas)), axis=1)
        requests, parts = np.nonzero(lengths)

        lengths = lengths[requests, parts]
        query_start_loc = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        indices = async_tensor_h2d(requests, device=device)
        rows_after = async_tensor_h2d(following[requests, parts].astype(np.int32), device=device)
        return cls(
            is_prompt=parts == 0,
            query_start_loc_np=query_start_loc,
            query_start_loc=async_tensor_h2d(query_start_loc, device=device),
            seq_lens=batch.seq_lens[indices] - rows_after,
            slots=batch.idx_mapping[indices],
            block_tables=[table[indices] for table in block_tables],
            max_query_len=int(lengths.max()),
        )


class LatestMetadata:
    """Keeps a step's attention metadata, and returns them for later steps that would build equal
    ones. A canvas is denoised in place, so from one denoising step to the next its request has the
    same rows, keys and pages. Building metadata anew costs as much as a layer of a small model."""

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
        """Returns the latest metadata if this step's would be equal, else keeps those of `build`.
        All tensors are on the CPU. Metadata refer to the runner's buffers, so those must be the
        same memory, too. The contents of slot mappings may differ: nothing is derived from them."""
        rules = [t for t in (window_rules.symmetric, window_rules.spans) if t is not None]
        tensors = (requests.seq_lens, causal, *rules, *requests.block_tables)
        made_of = (
            requests.query_start_loc_np.tobytes(),
            *(tensor.numpy().tobytes() for tensor in tensors),
            *(t.data_ptr() for t in (*tensors, slot_mappings)),
        )
        if made_of != self._made_of:
            self._metadata = build()
            self._made_of = made_of
        return self._metadata


class ImageRows:
    """Knows where images of requests lie, by slot, and which rows of a step belong to them."""

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device) -> None:
        self._images: dict[int, np.ndarray] = {}  # by slot, [k, 2] int64: starts and ends
        self._ends = np.zeros(max_num_reqs, dtype=np.int64)  # of each slot's last image; 0: none
        # Keeps its address: attention's metadata, which may be kept from step to step, refer to it.
        self._spans = torch.zeros(max_num_tokens, 2, dtype=torch.int32, device=device)

    def add_request(self, slot: int, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Keeps where a request's images lie, overwriting those of the slot's earlier request. The
        request may be new or come back after a preemption."""
        runs = [run for feature in features for run in feature.mm_position.extract_embeds_range()]
        images = np.array(runs, dtype=np.int64).reshape(-1, 2)  # with their last tokens
        self._images[slot] = images + np.array([0, 1])
        self._ends[slot] = self._images[slot][-1, 1] if runs else 0

    def remove_request(self, slot: int) -> None:
        self._images.pop(slot, None)
        self._ends[slot] = 0

    def requests_with_images(self, batch: InputBatch) -> np.ndarray:
        """Returns [k] int64: indices of requests whose step begins before the last image's end."""
        slots = batch.idx_mapping_np[: batch.num_reqs]
        first = batch.num_computed_tokens_np[: batch.num_reqs]
        return np.flatnonzero(first < self._ends[slots])

    def spans(self, batch: InputBatch) -> torch.Tensor | None:
        """Returns [num_tokens, 2] int32: start and end of the image that each row belongs to, as
        positions in its request; (0, 0) for none. The next call overwrites it. Returns None if no
        row of the step belongs to an image."""
        requests = self.requests_with_images(batch)
        if len(requests) == 0:
            return None
        spans = np.zeros((batch.num_tokens, 2), dtype=np.int32)
        for i in requests:
            first, num_rows = batch.num_computed_tokens_np[i], batch.num_scheduled_tokens[i]
            images = self._images[int(batch.idx_mapping_np[i])]
            rows = spans[batch.query_start_loc_np[i] :][:num_rows]
            for image, (start, end) in zip(images, (images - first).clip(min=0), strict=True):
                rows[start:end] = image
        if not spans.any():
            return None
        return async_tensor_h2d(spans, out=self._spans[: batch.num_tokens])
