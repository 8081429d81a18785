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
FARTHEST = 8
"""Tokens by which text inside a block moves at most where the answer adds or leaves out some."""
MOST_MOVES = 4
"""So many times in a block."""


def next_places(position: torch.Tensor, length: int) -> torch.Tensor:
    """[n, length] int64: from `position` [n] on, one after the other."""
    return position[:, None] + torch.arange(length, device=position.device)


def ended_with(
    stop_token: torch.Tensor,  # [n] int64; < 0: none
    expected: torch.Tensor,  # [n, C] int64, of `tokens_at`
    places: torch.Tensor,  # [n, C] int64, where they stand; the first is the block's beginning
    length: torch.Tensor,  # [n] int64, of the whole prediction
) -> torch.Tensor:
    """[n, C] int64: `expected` with the stop token everywhere behind the prediction's end. An
    answer that went on behind that end is one of which nothing is known."""
    ends_here = (places[:, 0] <= length) & (stop_token >= 0)
    fills = (places >= length[:, None]) & ends_here[:, None]
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
    there = tokens_at(prediction, places[..., None] - back)  # [n, W, LONGEST]
    last = emitted[:, None] - back  # [n, LONGEST]
    own = torch.where(last >= 0, block.gather(1, last.clamp(min=0)), NO_TOKEN - 1)
    found = (there == own[:, None]).long().cumprod(dim=-1).sum(dim=-1)  # [n, W]
    nearness = REACH - offsets.abs()
    is_place = (found >= LEAST) | (offsets == 0)
    best = (found * (REACH + 1) + nearness).masked_fill(~is_place, -1).argmax(dim=-1)
    return expected + offsets[best]


def realigned(
    prediction: torch.Tensor,  # [n, L] int; NO_TOKEN behind its end
    position: torch.Tensor,  # [n] int64, where the block began in it
    guess: torch.Tensor,  # [n, C] int64, of a step
) -> torch.Tensor:
    """[n, C] int64: the place in the prediction of each token of the block, as the guess has it.

    A part of the block, which mostly is all the rest of it, stands a few places further on or back
    if more of the guess is found there, and `LEAST` tokens more. The part and the move by which
    most are found come first, then what is best beside them; of equals the shortest move, the last
    beginning and the last end.
    """
    length, device = guess.shape[1], guess.device
    here = torch.arange(length, device=device)
    ends = here + 1
    order = torch.arange(2 * FARTHEST + 1, device=device)
    shifts = torch.where(order % 2 == 1, order // 2 + 1, -(order // 2))  # 0, 1, -1, 2, -2, ...
    num_moves = len(shifts) * length
    preference = (num_moves - length * order)[:, None] + here
    places = next_places(position, length)
    for _ in range(MOST_MOVES):
        found = tokens_at(prediction, places[:, None] + shifts[:, None]) == guess[:, None]
        more = found.long() - found[:, :1].long()  # [n, S, C], than without a move
        # For each beginning, the end up to which the sum of `more` is the greatest.
        up_to = more.cumsum(dim=-1)
        ranked = (up_to * (length + 1) + ends).flip(-1).cummax(dim=-1).values.flip(-1)
        end = ranked % (length + 1)
        gained = (ranked - end) // (length + 1) - (up_to - more)
        best = (gained * 2 * num_moves + preference).flatten(1).argmax(dim=-1, keepdim=True)
        is_better = gained.flatten(1).gather(1, best) >= LEAST
        part = (here >= best % length) & (here < end.flatten(1).gather(1, best))
        places = torch.where(is_better & part, places + shifts[best // length], places)
    return places


def tokens_at(
    prediction: torch.Tensor,  # [n, L] int; NO_TOKEN behind its end
    places: torch.Tensor,  # [n, ...] int64
) -> torch.Tensor:
    """[n, ...] int64: the prediction's tokens there; NO_TOKEN outside."""
    length = prediction.shape[1]
    inside = (places >= 0) & (places < length)
    flat = places.clamp(0, length - 1).flatten(1)
    return torch.where(inside, prediction.gather(1, flat).view_as(places).long(), NO_TOKEN)
