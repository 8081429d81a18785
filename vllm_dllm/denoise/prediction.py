"""Finds the place of an answer in the text that its client expects, a *predicted output*.

A block starts from the prediction's next tokens in place of noise, and the model denoises what is
wrong with them. Where the answer adds or leaves out tokens, everything behind them has moved, so
after each block the next place is searched for with the answer's last tokens.
"""

import torch

from vllm_dllm.denoise.rules import NO_TOKEN

LONGEST = 8
"""How many of the answer's last tokens are searched for in the prediction."""
LEAST = 3
"""How many of them must match at a place other than the expected one."""
REACH = 512
"""How many tokens before and behind the expected place are searched."""
FARTHEST = 8
"""How many tokens on or back text inside a block moves at most."""
MOST_MOVES = 4
"""How many parts of a block move at most."""


def next_places(position: torch.Tensor, length: int) -> torch.Tensor:
    """Returns [n, length] int64: `length` consecutive places, from `position` [n] on."""
    return position[:, None] + torch.arange(length, device=position.device)


def fill_behind_end(
    stop_token: torch.Tensor,  # [n] int64; < 0: none
    expected: torch.Tensor,  # [n, C] int64, what `tokens_at` returns for `places`
    places: torch.Tensor,  # [n, C] int64, places in the prediction; the first begins the block
    length: torch.Tensor,  # [n] int64, of the whole prediction
) -> torch.Tensor:
    """Returns `expected` [n, C] int64 with the stop token everywhere behind the prediction's end. A
    block that begins behind the end keeps what it has: nothing is known of it."""
    ends_here = (places[:, 0] <= length) & (stop_token >= 0)
    fills = (places >= length[:, None]) & ends_here[:, None]
    return torch.where(fills, stop_token[:, None], expected)


def locate_next_block(
    prediction: torch.Tensor,  # [n, L] int; NO_TOKEN behind its end
    position: torch.Tensor,  # [n] int64, where the block began in it
    block: torch.Tensor,  # [n, C] int64
    emitted: torch.Tensor,  # [n] int64, how many tokens of the block are the answer's, 1..C
) -> torch.Tensor:
    """Returns [n] int64: where the next block begins in the prediction. This is `emitted` tokens
    behind `position`, unless the answer's last tokens match better before another place within
    `REACH`: more of them match, and at least `LEAST`. Of several such places with equally many, the
    nearest one is taken."""
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


def realign_block(
    prediction: torch.Tensor,  # [n, L] int; NO_TOKEN behind its end
    position: torch.Tensor,  # [n] int64, where the block began in it
    guess: torch.Tensor,  # [n, C] int64, of a step
) -> torch.Tensor:
    """Returns [n, C] int64: the place in the prediction of each token of the block.

    A part of the block, usually all the rest of it, moves a few places on or back if at least
    `LEAST` more tokens of the guess match there. The part and the move that match most come first,
    then the best of what is left. Of equal ones, the shortest move is taken, then the last
    beginning, then the last end.
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
    """Returns [n, ...] int64: the prediction's tokens at `places`; NO_TOKEN outside of it."""
    length = prediction.shape[1]
    inside = (places >= 0) & (places < length)
    flat = places.clamp(0, length - 1).flatten(1)
    return torch.where(inside, prediction.gather(1, flat).view_as(places).long(), NO_TOKEN)
