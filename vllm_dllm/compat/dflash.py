"""Private names of vLLM's DFlash speculator. Loaded in workers alone: it loads model code."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator


class DFlashHooks(DFlashSpeculator):
    """vLLM's speculator, with some of its steps open to subclasses."""

    def blocks_prepared(self) -> None:
        """The inputs of the step's draft blocks are in the buffers. May change them on the device;
        becomes part of the captured graph."""

    def drafts(self) -> bool:
        """Whether anything is to be drafted in this step."""
        return True

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Profiling runs go without a captured graph, which would draft.
        kwargs["is_profile"] = kwargs.get("is_profile", False) or not self.drafts()
        return super().propose(*args, **kwargs)

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        super()._precompute_context_kv(start, end, dummy_run)
        if start == 0:  # else a part too long for the graph, which is replayed next
            self.blocks_prepared()

    def generate_draft(
        self, num_reqs: int, forward: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Drafts [num_reqs, num_speculative_tokens] of the prepared blocks, whose hidden states
        [num_tokens, hidden_size] `forward` makes. None: as vLLM does."""
        return None

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        if not self.drafts():
            return
        drafts = self.generate_draft(num_reqs, partial(self._run_model, *args, **kwargs))
        if drafts is None:
            super()._generate_draft(num_reqs, *args, **kwargs)
        else:
            self.draft_tokens[:num_reqs] = drafts
