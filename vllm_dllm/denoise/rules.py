"""Which of a step's candidates are kept, and when a canvas is finished: its best guess
no longer changes and the model is sure of it."""

from typing import NamedTuple

import torch

from vllm_dllm.denoise.row_stats import sum_dtype


def accept_by_entropy_bound(
    entropy_nats: torch.Tensor,  # [n, C] fp32; +inf at positions that are not part of the canvas
    entropy_bound: float | torch.Tensor,  # nats, for all canvases or [n]
) -> torch.Tensor:
    """Returns the accepted positions, [n, C] bool.

    Positions are accepted in order of rising entropy, while the summed entropy of those accepted
    before stays within the bound. So at least one is always accepted. The bound limits how strongly
    the accepted tokens can depend on each other (Ben-Hamu et al., "Accelerated Sampling from Masked
    Diffusion Models via Entropy Bounded Unmasking", arXiv 2505.24857).
    """
    ascending, order = torch.sort(entropy_nats, dim=-1, stable=True)
    # The reference subtracts the element from the inclusive sum; an exclusive sum computed
    # another way could differ in the last bit and flip a position at the bound. CPUs add in
    # float64, too, before they round.
    up_to = torch.cumsum(ascending, dim=-1, dtype=sum_dtype(ascending)).float()
    entropy_before = up_to - ascending
    if isinstance(entropy_bound, torch.Tensor):
        entropy_bound = entropy_bound[:, None]
    taken = entropy_before <= entropy_bound  # inf - inf is nan: absent positions are never taken
    return torch.zeros_like(taken).scatter_(-1, order, taken)


def accept_forced_positions(
    accepted: torch.Tensor,  # [n, C] bool
    forced: torch.Tensor,  # [n, C] bool, positions where a grammar leaves one token
) -> torch.Tensor:
    """Returns `accepted` [n, C] bool with forced positions decided by the last free position on
    their left. They are accepted if it is, or if there is none. Their own entropy says nothing: one
    wrong early token would lock the tokens that it forces."""
    position = torch.arange(forced.shape[-1], device=forced.device)
    last_choice = torch.where(forced, -1, position).cummax(dim=-1).values
    followed = accepted.gather(-1, last_choice.clamp(min=0)) | (last_choice < 0)
    return torch.where(forced, followed, accepted)


class Reveal(NamedTuple):
    """Says which canvases reveal best guesses permanently, position by position, as mask-noise
    diffusion models do: by a probability threshold (Wu et al., "Fast-dLLM", arXiv 2505.22618), or
    the k most certain ones per step (Nie et al., "Large Language Diffusion Models", arXiv
    2502.09992)."""

    is_chosen: torch.Tensor  # [n] bool, these canvases; the others use the entropy bound
    threshold: torch.Tensor  # [n] fp32, least probability of a best guess to reveal; > 1: none
    per_step: torch.Tensor  # [n] int64, reveal at least this many per step, the most probable
    revealed: torch.Tensor  # [n, C] bool, revealed by earlier steps
    tokens: torch.Tensor  # [n, C] int64, what revealed positions keep

    @property
    def kept(self) -> torch.Tensor:
        """Returns [n, C] bool: positions that earlier steps have revealed permanently."""
        return self.revealed & self.is_chosen[:, None]


def reveal_best_guesses(
    probability: torch.Tensor,  # [n, C] fp32, of each position's best guess
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
    rule: Reveal,
) -> torch.Tensor:
    """Returns [n, C] bool: the hidden positions that this step reveals. These reach the threshold,
    or are among the `per_step` most probable hidden ones."""
    hidden = ~rule.revealed if valid is None else ~rule.revealed & valid
    order = torch.where(hidden, probability, -1.0).argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, rank)
    enough = (probability >= rule.threshold[:, None]) | (rank < rule.per_step[:, None])
    return hidden & enough


NO_TOKEN = -1
"""The best guess before the first step: equal to no token id, so the first step repeats nothing."""

AT_REST = 4
"""Steps without a change of the best guess after which a canvas with a grammar is finished, even if
the model is unsure, as at a high temperature. The grammar leaves few tokens to change to."""


def times_repeated(
    best_guess: torch.Tensor,  # [n, C] int64
    earlier: torch.Tensor,  # [n, C] int64, the last step's best guess
    times: torch.Tensor,  # [n] int64, how often `earlier` had been repeated
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
) -> torch.Tensor:
    """Returns [n] int64: for how many consecutive steps the best guess has not changed."""
    same = best_guess == earlier
    if valid is not None:
        same |= ~valid
    return (times + 1) * same.all(dim=-1)


def is_confident(
    entropy_nats: torch.Tensor,  # [n, C] fp32
    valid: torch.Tensor | None,  # [n, C] bool; None: all
    confidence_threshold: float | torch.Tensor,  # nats, for all canvases or [n]
) -> torch.Tensor:
    """Returns [n] bool: whether the mean entropy of a canvas is below the threshold."""
    dtype = sum_dtype(entropy_nats)
    if valid is None:
        mean = entropy_nats.sum(dim=-1, dtype=dtype) / entropy_nats.shape[-1]
    else:
        total = torch.where(valid, entropy_nats, 0.0).sum(dim=-1, dtype=dtype)
        mean = total / valid.sum(dim=-1).clamp(min=1)
    return mean.float() < confidence_threshold


def up_to_first_stop(
    best_guess: torch.Tensor,  # [n, C] int64
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
    stop_tokens: torch.Tensor,  # [n, K] int64, tokens that end an answer; unused places: < 0
) -> torch.Tensor:
    """Returns [n, C] bool: the valid positions up to and including the first stop token. Later
    positions are not part of the answer, so a canvas need not wait for them."""
    stops = (best_guess[..., None] == stop_tokens[:, None, :]).any(dim=-1)
    if valid is not None:
        stops &= valid
    before = stops.cumsum(dim=-1) - stops.long()  # stop tokens before each position
    first = before == 0
    return first if valid is None else first & valid
