"""Where an answer stands in the text that its client expects: a *predicted output*.

A block starts from the prediction's next tokens in place of noise, and the model denoises what is
wrong with them. Where the answer adds or leaves out some, everything behind has moved: so after
each block the place is looked for by the last tokens of the answer.
"""

import torch

from vllm_dllm.denoise.convergence import NO_TOKEN

LONGEST = 8
"""Of the answer's last tokens, how many are looked for in the prediction."""
LEAST = 3
"""So many must be found for a place other than the expected one."""
REACH = 512
"""Tokens before and behind the expected place in which others are looked for."""


def next_tokens(
    prediction: torch.Tensor,  # [n, L] int; NO_TOKEN behind its end
    position: torch.Tensor,  # [n] int64, tokens of the prediction that the answer is past
    length: int,
) -> torch.Tensor:
    """[n, length] int64: the prediction from `position` on; NO_TOKEN outside."""
    return _take(prediction, position[:, None] + torch.arange(length, device=position.device))


def ended_with(
    stop_token: torch.Tensor,  # [n] int64; < 0: none
    expected: torch.Tensor,  # [n, C] int64, of `next_tokens`
    position: torch.Tensor,  # [n] int64
    length: torch.Tensor,  # [n] int64, of the whole prediction
) -> torch.Tensor:
    """[n, C] int64: `expected` with the stop token everywhere behind the prediction's end. An
    answer that went on behind that end is one of which nothing is known."""
    behind = position[:, None] + torch.arange(expected.shape[1], device=position.device)
    ends_here = (position <= length) & (stop_token >= 0)
    fills = (behind >= length[:, None]) & ends_here[:, None]
    return torch.where(fills, stop_token[:, None], expected)


def follow(
    prediction: torch.Tensor,  # [n, L] int; NO_TOKEN behind its end
    position: torch.Tensor,  # [n] int64, where the block began in it
    block: torch.Tensor,  # [n, C] int64
    emitted: torch.Tensor,  # [n] int64, how many tokens of the block are the answer's, 1..C
) -> torch.Tensor:
    """[n] int64: where the next block begins in the prediction.

    As many tokens further, unless more of the answer's last tokens, and `LEAST` of them, stand
    before another place within `REACH`; of several such places the nearest.
    """
    device = position.device
    expected = position + emitted
    offsets = torch.arange(-REACH, REACH + 1, device=device)
    back = torch.arange(1, LONGEST + 1, device=device)
    places = expected[:, None] + offsets  # [n, W]
    there = _take(prediction, places[..., None] - back)  # [n, W, LONGEST]
    last = emitted[:, None] - back  # [n, LONGEST]
    own = torch.where(last >= 0, block.gather(1, last.clamp(min=0)), NO_TOKEN - 1)
    found = (there == own[:, None]).long().cumprod(dim=-1).sum(dim=-1)  # [n, W]
    nearness = REACH - offsets.abs()
    is_place = (found >= LEAST) | (offsets == 0)
    best = (found * (REACH + 1) + nearness).masked_fill(~is_place, -1).argmax(dim=-1)
    return expected + offsets[best]


def _take(prediction: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`prediction` [n, L] at `places` [n, ...], with NO_TOKEN outside; int64."""
    length = prediction.shape[1]
    inside = (places >= 0) & (places < length)
    flat = places.clamp(0, length - 1).flatten(1)
    return torch.where(inside, prediction.gather(1, flat).view_as(places).long(), NO_TOKEN)
