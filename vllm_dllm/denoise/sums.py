"""The type in which deciding sums are added, so that they do not depend on neighbours."""

import torch


def sum_type(terms: torch.Tensor) -> torch.dtype:
    """A GPU adds in an order that depends on the number of canvases. In float64 that makes no
    difference to sums of fp32."""
    return torch.float64 if terms.is_cuda else terms.dtype
