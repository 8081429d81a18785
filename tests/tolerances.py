"""Every tolerance of the tests and benches, each with its reason.

What has one right answer is compared exactly: tokens, masks, packed weights, whatever the same
operations compute. What goes through sums in another order may be off by what dtypes and lengths
say, on any machine (`attention_kernels.rounding`). Attention's own bound is
`attention_kernels.testing.allowed`. What no rounding explains, an estimate or a sampled frequency,
stands at the end. Python's own sums of a few numbers are compared with `pytest.approx` as it is.
"""

from statistics import NormalDist
from typing import TypedDict

import torch

from attention_kernels.rounding import DEVIATIONS, FEW, dot_error, sum_error, unit_roundoff

U = unit_roundoff(torch.float32)


class Tolerance(TypedDict):
    """Of `torch.testing.assert_close`."""

    rtol: float
    atol: float


def within(share: float, size: float = 0.0) -> Tolerance:
    """Off by a share of the result, and of terms of this size where they cancel in it."""
    return {"rtol": share, "atol": share * size}


def assert_within(
    actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float
) -> None:
    """Element by element; a NaN is never right."""
    off = (actual.double() - expected.double()).abs()
    allowed = torch.as_tensor(allowed).expand_as(off)
    if not (off <= allowed).all():
        worst = int((off / allowed).nan_to_num(torch.inf).argmax())
        found, most = off.flatten()[worst], allowed.flatten()[worst]
        raise AssertionError(f"off by {found:.3g}, allowed is {most:.3g}")


# --- Short formulas, sums, softmax ---------------------------------------------------------------


SHORT = FEW * U
"""Share of a formula of a few products, quotients and exponentials: no sum."""


def short_formula(size: float = 1.0) -> Tolerance:
    return within(SHORT, size)


def total(terms: int) -> float:
    """Share of the sum of magnitudes."""
    return sum_error(terms) + SHORT


def softmax(terms: int, largest_logit: float) -> float:
    """Share by which weights exp(logit - maximum), their total and a mean under them may be off:
    each logit is rounded, scaled or capped, and shifted before the exponential, then come two
    sums."""
    return 2 * sum_error(terms) + U * (FEW + 4 * largest_logit)


def entropy(terms: int, largest_logit: float, spread: float) -> float:
    """Nats: log of the total less the mean of logits, which lie `spread` below the largest."""
    return (1 + spread) * softmax(terms, largest_logit)


def norm(width: int) -> float:
    """Share of an RMS norm's result: half of its sum's."""
    return total(width) / 2 + SHORT


# --- Layers and models ---------------------------------------------------------------------------

SUMS_OF_A_LAYER = 10
"""One behind the other: norm, q or k or v, its norm, scores, weighted sum, output, norm, gate or
up, down, router or another norm."""


def product(width: int) -> float:
    """Share of a typical element of a matrix product whose terms have both signs."""
    return dot_error() * width**0.5


def model(layers: int, width: int, logits: float) -> float:
    """Of logits or log-probabilities that are `logits` apart, when all errors of all layers point
    the same way. Random weights amplify errors less than that in one step."""
    return layers * SUMS_OF_A_LAYER * product(width) * logits


# The tiny random and the shipped DiffusionGemma: at most 5 layers with sums of up to 256 terms, and
# log-probabilities some 8 nats apart.
LOGPROB = model(layers=5, width=256, logits=8.0)
LOGIT = LOGPROB


ROTATED_IN_FP32 = within(2 * FEW * SUMS_OF_A_LAYER * U, size=4.0)
"""Drafters compared in float64, in two layers. Only their norms and rotations are in fp32, as in
vLLM: angles of up to 16 radians, off by U of that."""

BETWEEN_TIES = 10 * LOGPROB
"""Of log-probabilities whose linears round their inputs to 8 or 4 bits. An input on the other side
of a tie moves random weights' by more than this, rounding alone by `LOGPROB` at most."""
NOISE_OF_INPUTS = 5 * U
"""Standard deviation of the noise that tells whether an input lies next to a tie, as a share."""

# --- Rounding to 16 and 8 bits -------------------------------------------------------------------


def one_step(dtype: torch.dtype, size: float = 0.0) -> Tolerance:
    """The same number, rounded to `dtype` from values that differ in fp32's last bits: where these
    lie on both sides of a tie, the neighbour. Below the normal numbers steps are of one size."""
    smallest_step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    tolerance = within(2 * unit_roundoff(dtype), size)
    tolerance["atol"] = max(tolerance["atol"], smallest_step)
    return tolerance


def quantised_experts(step: float, dtype: torch.dtype) -> float:
    """Share of the largest sums of magnitudes. The inputs of gate, up and down are rounded by
    `step` of the largest of a row, and GELU's slope is 1.13 at most; in the model's type, the two
    products, the activation, their product, down's sum, the weighted one and the total."""
    return 1.13 * (3 * step + FEW * unit_roundoff(dtype))


def experts_on_average(dtype: torch.dtype, is_fp8: bool) -> float:
    """RMS ratio of experts' results to exact ones, where numbers between products are rounded to
    `dtype`, and then, if `is_fp8`, to e4m3 in both. An error moves a number to the other side of a
    tie with a chance of its size by a step's, and then by a step."""
    own = FEW * unit_roundoff(dtype)
    return own + is_fp8 * (own * 2 * unit_roundoff(torch.float8_e4m3fn)) ** 0.5


LOGPROB_OF_LAST_STEP = 10 * LOGPROB
"""After some denoising steps, each of which conditions on the logits before. The least stable of
random weights amplify an error tenfold on their way to the last."""

ROW_OF_BF16_LOGITS = (
    (1 + DEVIATIONS / 40**0.5) * (2 * SUMS_OF_A_LAYER + FEW) ** 0.5 * unit_roundoff(torch.bfloat16)
)
"""Share of a row's spread by which its 20 best logits may be off (RMS), where a model of two layers
computes in bf16: the results of its sums and a few behind the last layer are each rounded by u of
their size at most. An RMS of 20 deviates by its 40th root."""
BESIDE_BF16 = 1.5
"""How many times the error of one model in bf16, a mean over rows, another's may be. Both round as
often; which results are rounded, and which stay in fp32, is up to each."""
ROWS_OF_SAME_EXPERTS = 0.5
"""Share of the rows that three models, one of them exact, send to the same 8 of 128 experts in two
layers. Of scores 2 apart the eighth and the ninth best lie 0.13 apart on average, and rounding
moves them by a hundredth of their spread."""

# --- Tokens ---------------------------------------------------------------------------------------

DECISION = model(layers=5, width=256, logits=8.0) / (5 * SUMS_OF_A_LAYER) ** 0.5
"""Of a log-probability at temperature 1 that a token is chosen by: errors of layers and sums add as
independent ones do."""
PARTED = 0.05
"""Share of the generations that may part where rounding decides, at most: some thousand decisions
each, of which few are as close as `DECISION`."""

NOISE = 16 * U
"""Standard deviation of a weight's noise, as a share. Each product is then off by about as much; by
rounding it is off by a few U (`product`, without its deviations), so this is several times more."""
NOISES = 2
"""Runs with noise. An answer whose margin rounding exceeds passes one with a chance of a fifth."""
NOISES_OF_LOGPROBS = 8
"""Runs with noise, the largest of whose changes counts."""
NOISES_AT_A_TIE = 32
"""At most so many runs with noise. Near a tie, where one run in eight goes another way, none of
them does with a chance of 1 in 70."""
DECIDED = 0.8
"""Share of the answers of random weights that noise leaves alone, at least."""

# --- Frequencies and estimates -------------------------------------------------------------------

P_VALUE = 1e-3
"""Of a chi-square test: right draws fall below it with one seed in a thousand. Seeds are fixed."""

COUNT = 0.03
"""Share by which a count of the 26B model's parameters may miss the published one, which is
rounded: norms, the router and what self-conditioning adds are left out."""


def mean_of_uniform(draws: int) -> float:
    """How far the mean of so many draws from [0, 1) lies from a half."""
    return DEVIATIONS / (12 * draws) ** 0.5


def correlation(pairs: int) -> float:
    """Of what is independent."""
    return DEVIATIONS / pairs**0.5


def tokens_left(share: float) -> float:
    """Share by which `top_p` = `share` leaves fewer tokens than that share at a temperature of 100.

    The shipped model's logits then deviate by up to 0.15, and the more probable half of such tokens
    holds more than half of the probability. Entropies count tokens to 5% beside.
    """
    normal = NormalDist()
    missed = 1 - normal.cdf(-normal.inv_cdf(1 - share) - 0.15) / share if share < 1 else 0.0
    return missed + 0.05


STEP_COSTS = 0.08
"""Share of a step's cost as fitted to times with 5% noise, some of them 8 times too long."""
STEP_COSTS_OF_A_STEADY_MACHINE = 0.05
"""The same from times without noise, while those of another machine are being forgotten."""
OTHER_SYSTEM = 1e-2
"""Of mean entropies in nats, and as a share of a mean embedding's size, where another system takes
the same bf16 logits: it rounds them, or what it makes of them, by up to 2^-8 once more or less."""
BEAM_NATS = 0.1
"""By how much a path through a canvas may be less probable than the best one and count as found:
a tenth less probable, where rounding moves the sums of log-probabilities by a thousandth of it."""
PUBLISHED_BYTES = 5e4
"""Sizes are published in GB with four digits behind the point."""

ROUNDED_ENTROPY = 0.5e-3 + 0.5e-4
"""nats. A canvas' mean entropy, written with four decimals, next to the mean of its positions',
each written with three."""
