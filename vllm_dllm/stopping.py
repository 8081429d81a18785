"""Which block is a request's last one, known on the device: vLLM's own rules (`check_stop`)."""

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from vllm_dllm.config import ExtensionConfig

MAX_STOP_TOKENS = 16
"""A request with more stop tokens is not foreseen to stop at one of them: the block that has it is
committed like any other."""

NEVER = -1
"""Fills the unused places of a stop token list."""


EVERY_BLOCK = 0
NO_BLOCK = 1 << 62
"""Ends of requests of which every block counts as the last one, or none."""


def spares_last_commit(vllm_config: VllmConfig) -> bool:
    """Whether a request's last block is emitted without a commit. Not with a KV connector: it
    would store or send what a denoising step left in the cache."""
    config = ExtensionConfig.from_additional_config(vllm_config.additional_config)
    return not config.commit_last_block and vllm_config.kv_transfer_config is None


def stop_tokens(params: SamplingParams) -> list[int]:
    """The tokens that end a request, at most MAX_STOP_TOKENS. Stop strings are not among them, the
    scheduler does not know those either."""
    tokens = [] if params.eos_token_id is None else [params.eos_token_id]
    tokens += params.stop_token_ids or []
    return tokens if len(tokens) <= MAX_STOP_TOKENS else []


def is_last_block(
    tokens: torch.Tensor,  # [n, C] int64, the blocks
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of their block; None: all
    block_ends: torch.Tensor,  # [n] int64, absolute position after each block
    request_ends: torch.Tensor,  # [n] int64, absolute position after the last token asked for
    stop_tokens: torch.Tensor,  # [n, K] int64
) -> torch.Tensor:
    """[n] bool: the scheduler ends the request with this block."""
    stops = tokens[:, :, None] == stop_tokens[:, None, :]
    if valid is not None:
        stops &= valid[:, :, None]
    return stops.flatten(1).any(dim=-1) | (block_ends >= request_ends)
