"""Which block is a request's last, as the device can tell: vLLM's own rules (`check_stop`)."""

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

MAX_FORESEEN_STOPS = 16
"""With more stop tokens than this, a stop at one of them is not foreseen, and the last block is
committed like any other."""

NEVER = -1
"""Fills unused places in a list of stop tokens."""

NO_END = 1 << 40
"""The end of requests whose canvases are not fitted to the tokens that may still come."""

EVERY_BLOCK = 0
"""The end of requests for which every block counts as the last."""


def stop_tokens(params: SamplingParams) -> list[int]:
    """The tokens that end a request; none if there are more than MAX_FORESEEN_STOPS. Stop strings
    are not among them: the scheduler does not know those either."""
    tokens = [] if params.eos_token_id is None else [params.eos_token_id]
    tokens += params.stop_token_ids or []
    return tokens if len(tokens) <= MAX_FORESEEN_STOPS else []


def is_last_block(
    tokens: torch.Tensor,  # [n, C] int64, the blocks
    valid: torch.Tensor | None,  # [n, C] bool, positions that belong to the block; None: all
    block_ends: torch.Tensor,  # [n] int64, absolute position after each block
    request_ends: torch.Tensor,  # [n] int64, absolute position after the last token asked for
    stop_tokens: torch.Tensor,  # [n, K] int64
) -> torch.Tensor:
    """[n] bool: the scheduler ends the request with this block. `step/uniform/settle_triton.py`
    says the same of a fused step."""
    stops = tokens[:, :, None] == stop_tokens[:, None, :]
    if valid is not None:
        stops &= valid[:, :, None]
    return stops.flatten(1).any(dim=-1) | (block_ends >= request_ends)


def was_foreseen(request: Request, num_kept: int, max_model_len: int) -> bool:
    """Whether `is_last_block` was true of the block that `request` has just stopped with, of which
    it kept the first `num_kept` tokens. It is not for stops that only the host knows, such as
    repetition."""
    if request.num_tokens >= min(request.num_prompt_tokens + request.max_tokens, max_model_len):
        return True
    assert request.sampling_params is not None
    stops = stop_tokens(request.sampling_params)
    return any(token in stops for token in request.output_token_ids[-num_kept:])
