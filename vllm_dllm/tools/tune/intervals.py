"""How sure an accuracy is, and the difference between two on the same prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95, Z_97_5 = 1.959964, 2.241403


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


def mean_interval(values: Sequence[float], z: float = Z_95) -> Interval:
    """Wilson's score interval of the mean of values from 0 to 1; 95% unless `z` says otherwise.
    Made for values of 0 and 1; others vary less, so the interval is then wider than it need be.

    Source: Wilson, Probable inference, J. Am. Stat. Assoc. 22 (1927).
    """
    n, mean = len(values), math.fsum(values) / len(values)
    weight = z**2 / n
    centre = (mean + weight / 2) / (1 + weight)
    half = z * math.sqrt(mean * (1 - mean) / n + weight / (4 * n)) / (1 + weight)
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


def difference_interval(values: Sequence[float], before: Sequence[float]) -> Interval:
    """The 95% interval of how much the mean of `values`, from 0 to 1, is above that of `before`.
    The share of gains and the share of losses have an interval each, of 97.5%."""
    changes = [after - other for after, other in zip(values, before, strict=True)]
    gain = mean_interval([max(change, 0.0) for change in changes], Z_97_5)
    loss = mean_interval([max(-change, 0.0) for change in changes], Z_97_5)
    return Interval(gain.value - loss.value, gain.low - loss.high, gain.high - loss.low)
