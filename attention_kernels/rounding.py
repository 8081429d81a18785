"""Bounds on how far rounding may move a result, which follow from the arithmetic.

A machine chooses the order of a sum, the width of its vectors, and whether a product is fused with
the addition after it. So an allowed error is computed from dtypes and lengths, never measured.

u is the unit roundoff: a result is rounded by at most u of its size. Each of the n additions of a
sum rounds once, which adds up to n u of the sum of magnitudes at worst. Roundings are practically
independent, so DEVIATIONS sqrt(n) u is exceeded about once in 10^9 sums (Higham and Mary, "A
new approach to probabilistic rounding error analysis", 2019). Where terms have both signs the
partial sums stay small, and the bound is u times a constant, whatever n is (the same, "Sharper
probabilistic backward error analysis for basic linear algebra kernels with random data", 2020).
"""

import torch

DEVIATIONS = 6
FEW = 8  # roundings of a short formula: products, quotients, an exponential of 2 to 4 of them


def unit_roundoff(dtype: torch.dtype) -> float:
    """Returns half the distance from 1 to the next number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def sum_error(length: int, dtype: torch.dtype = torch.float32) -> float:
    """Returns the largest error of a sum of `length` terms, added in any order, as a share of the
    sum of their magnitudes."""
    return min(length, DEVIATIONS * length**0.5) * unit_roundoff(dtype)


def dot_error(dtype: torch.dtype = torch.float32) -> float:
    """Returns the largest error of a product of two vectors with both signs, as a share of the
    product of their norms.

    Added one after the other, the partial sums of n such terms of size s grow like s sqrt(k). Each
    is rounded by u / sqrt(3) of it on average, which adds up to 0.41 u n s, and n s is the product
    of the norms.
    """
    return DEVIATIONS * 0.41 * unit_roundoff(dtype)


def row_error(dtype: torch.dtype) -> float:
    """Returns the RMS ratio of a row of attention whose weights and result are rounded to `dtype`.

    A row that sees few keys may have all their weights off by u. Its own elements are off by
    u / sqrt(3) on average, and by half as much again in a row of 32 (DEVIATIONS of their mean).
    """
    return (1 + 1.5**2 / 3) ** 0.5 * unit_roundoff(dtype)
