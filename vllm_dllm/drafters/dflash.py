"""vLLM's DFlash speculator, drafting as many tokens for each request as the scheduler asks for.

A step's draft is one forward of the drafter over a block for each request: the token sampled last
and mask tokens behind it. Keys and values of what the target computed before are made of the
target's hidden states, whether or not anything is drafted, so that drafting can be taken up again
any time.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.compat.dflash import DFlashHooks
from vllm_dllm.config import ExtensionConfig

logger = init_logger(__name__)


class WidthDFlashSpeculator(DFlashHooks):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        config = ExtensionConfig.from_additional_config(vllm_config.additional_config).drafter
        if config.draft_window is not None:
            see_window(vllm_config.speculative_config.draft_model_config, config.draft_window)
        super().__init__(vllm_config, device)
        self._narrows = config.narrow_draft or config.max_context is not None
        # Read by the captured graph: tokens to draft for each request of the batch.
        self._block_widths = torch.full(
            (self.max_num_reqs,), self.num_speculative_steps, dtype=torch.int32, device=device
        )
        self._widths: dict[str, int] = {}

    def set_draft_widths(self, widths: dict[str, int]) -> None:
        """Tokens to draft after the coming step for each of its requests, 0 for none."""
        self._widths = widths

    def drafts(self) -> bool:
        return not self._widths or any(self._widths.values())

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._narrows and not kwargs.get("dummy_run"):
            widths = np.array([self._widths[name] for name in input_batch.req_ids], np.int32)
            async_tensor_h2d(widths, out=self._block_widths[: len(widths)])
        return super().propose(input_batch, *args, **kwargs)

    def blocks_prepared(self) -> None:
        if self._narrows:
            narrow_blocks(
                self.input_buffers.seq_lens, self._block_widths, self.num_speculative_steps
            )


def see_window(draft_model_config: Any, window: int) -> None:
    """Makes the drafter of a configuration see the last `window` tokens and its block.

    vLLM then keeps and frees its cache like that of any layer with a sliding window.
    """
    hf_config = draft_model_config.hf_config
    settings = dict(getattr(hf_config, "dflash_config", None) or {})
    own = settings.get("swa_window_size") or getattr(hf_config, "sliding_window", None)
    if own is not None and own < window:
        raise ValueError(
            f"drafter.draft_window is {window}, but the drafter {draft_model_config.model} was "
            f"made for a window of {own}. Lower it or leave it out."
        )
    logger.info("The drafter sees the last %d tokens.", window)
    settings |= {"use_swa": True, "swa_window_size": window}
    settings.setdefault("causal", False)
    hf_config.dflash_config = settings


def narrow_blocks(
    seq_lens: torch.Tensor,  # [R] int32 of context and block, changed in place; 0 = no request
    widths: torch.Tensor,  # [R] int32, tokens to draft; 0 = none
    num_drafted: int,  # tokens that every block has rows for
) -> None:
    """Hides the mask tokens beyond `widths` from the others of their block. Their rows are still
    computed, so that all requests have as many; what they draft is not used. A request that drafts
    nothing sees a block's length of keys, for next to no price.

    Rows see all keys of a length, and there must not be fewer of them than rows: contexts shorter
    than what is hidden keep a wider block.
    """
    block = num_drafted + 1
    narrower = torch.where(widths == 0, block, seq_lens - (num_drafted - widths))
    torch.minimum(narrower.clamp_(min=block), seq_lens, out=seq_lens)
