"""Finds the rows of a step that belong to images, whose tokens see each other both ways.

Only prompts hold images. One comparison of arrays on the host tells whether any request of a step
is at its images; most steps do nothing more.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch


class ImageRows:
    """Knows where the images of requests lie, by slot, and tells which rows of a step belong to
    them."""

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
        """Returns [k] int64: batch indices of requests whose step begins before the end of their
        last image."""
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
