"""Finds out on the device whether a block is its request's last, by vLLM's rules (`check_stop`)."""

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

MAX_FORESEEN_STOPS = 16
"""If a request has more stop tokens than this, the device looks for none of them, and the request's
last block is committed like any other."""

NEVER = -1
"""Fills unused places in a list of stop tokens."""

NO_END = 1 << 40
"""The end position of requests whose canvases are not narrowed to their remaining tokens."""

EVERY_BLOCK = 0
"""The end position of requests for which every block counts as the last."""


def foreseen_stop_tokens(params: SamplingParams) -> list[int]:
    """Returns the tokens that end a request, EOS first; an empty list if there are more than
    `MAX_FORESEEN_STOPS`. Stop strings are left out: the scheduler does not know them either."""
    tokens = [] if params.eos_token_id is None else [params.eos_token_id]
    tokens += params.stop_token_ids or []
    return tokens if len(tokens) <= MAX_FORESEEN_STOPS else []


def is_last_block(
    tokens: torch.Tensor,  # [n, C] int64, the blocks
    valid: torch.Tensor | None,  # [n, C] bool, positions that belong to the block; None: all
    block_ends: torch.Tensor,  # [n] int64, absolute position after each block
    request_ends: torch.Tensor,  # [n] int64, absolute position after the last token asked for
    stop_tokens: torch.Tensor,  # [n, K] int64, of each request; unused places have `NEVER`
) -> torch.Tensor:
    """Returns [n] bool, on the tensors' device: whether the scheduler will end the request with
    this block. A fused step computes the same in `step/uniform/settle_triton.py`."""
    stops = tokens[:, :, None] == stop_tokens[:, None, :]
    if valid is not None:
        stops &= valid[:, :, None]
    return stops.flatten(1).any(dim=-1) | (block_ends >= request_ends)


def was_stop_foreseen(request: Request, num_kept: int, max_model_len: int) -> bool:
    """Returns whether `is_last_block` was True for the block that `request` has just stopped with.
    The request has kept the first `num_kept` tokens of that block, at least one. The result is
    False for a stop that only the host knows, such as one for repetition."""
    if request.num_tokens >= min(request.num_prompt_tokens + request.max_tokens, max_model_len):
        return True
    assert request.sampling_params is not None
    stops = foreseen_stop_tokens(request.sampling_params)
    return any(token in stops for token in request.output_token_ids[-num_kept:])
