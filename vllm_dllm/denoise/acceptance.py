"""Which candidates of a step are kept: the entropy bound."""

import torch


def accept_by_entropy_bound(
    entropy_nats: torch.Tensor,  # [n, C] fp32; +inf at positions that are not part of the canvas
    entropy_bound: float,  # nats
) -> torch.Tensor:
    """Accepted positions [n, C] bool.

    Positions are taken from the most certain on, while the entropy of those taken *before* stays
    within the bound, so at least one position is always accepted. The bound limits how far the
    accepted tokens can depend on each other (Ben-Hamu et al., "Accelerated Sampling from Masked
    Diffusion Models via Entropy Bounded Unmasking", arXiv 2505.24857).
    """
    ascending, order = torch.sort(entropy_nats, dim=-1)
    # The reference subtracts the element from the inclusive sum; an exclusive sum computed
    # another way could differ in the last bit and flip a position at the bound.
    entropy_before = torch.cumsum(ascending, dim=-1) - ascending
    taken = entropy_before <= entropy_bound  # inf - inf is nan: absent positions are never taken
    return torch.zeros_like(taken).scatter_(-1, order, taken)
