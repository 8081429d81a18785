"""Linear verification: how many drafts of each request the target accepts, and the token that it
adds; with the random numbers of vLLM's sampling kernels (`sample/gumbel.py`) in NumPy.

A request has a row of logits for each draft and one more. Row i is the target's distribution of the
token at draft i, so the row of the first refused draft, or the last row, yields a token of the
target's own. Greedy requests keep drafts that equal the target's best token. Sampled requests
follow Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(arXiv:2211.17192): draft x is kept with probability min(1, p(x) / q(x)); where it is refused, the
token is drawn from max(p - q, 0), normalised, and so every token is distributed as p. A drafter
that took its best guess has q(x) = 1.

Uniform random numbers are vLLM's bit for bit, Gumbel noise up to the rounding of a logarithm. A
draw depends on the request's seed, the token's position and, where each token of the vocabulary has
its own draw, the token id. So a native kernel picks the same token as the Triton kernel.

N = rows of logits of all requests, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_MASK = np.uint64(0xFFFFFFFF)
_SECOND_STREAM = 0x9E3779B9  # of the upper 32 bits of an fp64 draw
"""Domain of the hash for the upper 32 bits of an fp64 draw."""
_SMALLEST_PHILOX = np.float32(4.6566127342e-10)


def _as_uint64(integers: Array) -> Array:
    """Returns int64 numbers as uint64 of the same bits."""
    return integers.astype(np.int64).view(np.uint64)


def _rotate_left(x: Array, bits: int) -> Array:
    """Returns uint32 numbers with their bits rotated to the left by `bits`."""
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _mix_murmur3(h: Array, key: Array) -> Array:
    """Returns MurmurHash3's hash `h` after four more bytes, `key`: both uint32."""
    key = _rotate_left(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate_left(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def murmur3(seeds: Array, positions: Array, tokens: Array, domain: int = 0) -> Array:
    """Returns uint32 hashes of `seeds`, `positions` and the lower halves of `tokens`, all int64 and
    broadcast against each other. `domain`: the hash to begin with."""
    with np.errstate(over="ignore"):
        seeds, positions = _as_uint64(seeds), _as_uint64(positions)
        h = np.full(seeds.shape, domain, np.uint32)
        h = _mix_murmur3(h, (seeds & _MASK).astype(np.uint32))
        h = _mix_murmur3(h, (seeds >> np.uint64(32)).astype(np.uint32))
        h = _mix_murmur3(h, (positions & _MASK).astype(np.uint32))
        h = _mix_murmur3(h, tokens.astype(np.uint32)) ^ np.uint32(16)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))


def gumbel_noise(seeds: Array, positions: Array, tokens: Array, fp64: bool) -> Array:
    """Returns Gumbel noise, fp64 or fp32, for `seeds`, `positions` and `tokens`, all int64 and
    broadcast. In fp32 the large values, which decide, have the finest steps."""
    if fp64:
        low = murmur3(seeds, positions, tokens).astype(np.uint64)
        high = murmur3(seeds, positions, tokens, _SECOND_STREAM).astype(np.uint64)
        bits = ((high << np.uint64(32)) | low) >> np.uint64(11)  # 53 of them
        uniform = (bits.astype(np.float64) + 0.5) * 1.1102230246251565e-16
        uniform = np.where(uniform == 1.0, uniform - 1.1102230246251565e-16, uniform)
        return -np.log(-np.log(uniform))
    bits = murmur3(seeds, positions, tokens)
    upper = (bits >> np.uint32(16)).astype(np.float32) * np.float32(1.52587890625e-05)
    lower = (bits & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)
    uniform = upper + lower * np.float32(2.3283064365386963e-10)
    return -np.log(-np.log1p(-uniform))


def philox_uniform(seeds: Array, positions: Array) -> Array:
    """Returns fp32 draws in (0, 1) from int64 arrays of one shape: Triton's `tl.rand`, never
    zero."""
    seeds, positions = _as_uint64(seeds), _as_uint64(positions)
    key0, key1 = seeds & _MASK, seeds >> np.uint64(32)
    c0, c1 = positions & _MASK, positions >> np.uint64(32)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        # Products of 32 bits each, in 64: upper and lower half.
        b, a = np.uint64(0xCD9E8D57) * c2, np.uint64(0xD2511F53) * c0
        c0, c2 = (b >> np.uint64(32)) ^ c1 ^ key0, (a >> np.uint64(32)) ^ c3 ^ key1
        c1, c3 = b & _MASK, a & _MASK
        key0 = (key0 + np.uint64(0x9E3779B9)) & _MASK
        key1 = (key1 + np.uint64(0xBB67AE85)) & _MASK
    signed = c0.astype(np.uint32).view(np.int32)
    magnitude = np.where(signed < 0, ~signed, signed).astype(np.float32)
    return np.maximum(magnitude * _SMALLEST_PHILOX, _SMALLEST_PHILOX)


def rejection_sample(
    target_logits: torch.Tensor,  # [N, V] fp32, after temperature and filters
    draft_logits: torch.Tensor | None,  # [max_num_reqs, num_speculative_steps, V], no temperature;
    # None: drafts are best guesses
    draft_sampled: torch.Tensor,  # [N] int32, the input token of each row: a draft but in a
    # request's first row; -1 where there is none to accept
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32, bounds of each request's rows
    pos: torch.Tensor,  # [N] int64
    idx_mapping: torch.Tensor,  # [num_reqs] int64, batch row -> slot
    expanded_idx_mapping: torch.Tensor,  # [N] int64, logit row -> slot
    expanded_local_pos: torch.Tensor,  # [N] int32, the row's index in its request
    temperature: torch.Tensor,  # [max_num_reqs] fp32
    seed: torch.Tensor,  # [max_num_reqs] int64
    num_speculative_steps: int,
    use_fp64: bool = False,  # of the noise that draws tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verifies drafts as vLLM's function of this name does, with the same random numbers.

    Returns tokens [num_reqs, num_speculative_steps + 1] int64: each request's drafts up to the
    first that is refused, and then the target's token. Also returns how many of a request's tokens
    count, [num_reqs] int32, at least one.
    """
    if draft_logits is not None:  # a target's vocabulary may be padded further than its drafter's
        target_logits = target_logits[:, : draft_logits.shape[-1]]
    starts, ends = cu_num_logits[:-1, None].long(), cu_num_logits[1:, None].long()
    columns, last_row = torch.arange(num_speculative_steps + 1), len(target_logits) - 1
    rows = (starts + columns).clamp(max=last_row)
    following = draft_sampled[(rows + 1).clamp(max=last_row)].long()
    proposed = torch.where(starts + columns < ends - 1, following, -1)

    best = target_logits.argmax(dim=-1)
    accepted = best[rows] == proposed
    greedy = temperature[idx_mapping] == 0
    sampled = None
    if not bool(greedy.all()):
        if draft_logits is not None:
            # A request's last row has no draft; it borrows the one before.
            steps = expanded_local_pos.long().clamp(max=num_speculative_steps - 1)
            temperatures = temperature[expanded_idx_mapping]
            temperatures[temperatures == 0] = 1.0
            draft_logits = draft_logits[expanded_idx_mapping, steps].float()
            draft_logits /= temperatures[:, None]
        seeds = seed[expanded_idx_mapping].numpy()
        sampled = _SampledRows(target_logits, draft_logits, seeds, pos.numpy(), use_fp64)
        accepted = torch.where(greedy[:, None], accepted, sampled.accept(proposed, rows))
    num_accepted = (accepted & (proposed >= 0)).int().cumprod(dim=1).sum(dim=1)

    last = starts[:, 0] + num_accepted
    final = best[last]
    if sampled is not None:
        refused = proposed.gather(1, num_accepted[:, None]).squeeze(1)
        final = torch.where(greedy, final, sampled.draw(last, refused))
    tokens = torch.where(columns < num_accepted[:, None], proposed, final[:, None])
    return tokens, (num_accepted + 1).int()


@dataclass(frozen=True)
class _SampledRows:
    """Distributions and random numbers of rows whose tokens are drawn."""

    logits: torch.Tensor  # [N, V] fp32 of the target
    draft_logits: torch.Tensor | None  # [N, V] fp32 that each row's draft was drawn from; None:
    # drafts are best guesses
    seeds: np.ndarray  # [N] int64
    positions: np.ndarray  # [N] int64
    use_fp64: bool

    def accept(
        self,
        drafts: torch.Tensor,  # [num_reqs, columns] int64, -1 where there is none
        rows: torch.Tensor,  # [num_reqs, columns] int64, the row of each draft
    ) -> torch.Tensor:
        """Returns whether each draft is kept, bool; any value where there is no draft."""
        tokens = drafts.clamp(min=0)
        ratio = self.logits[rows, tokens] - self.logits.logsumexp(dim=-1)[rows]
        if self.draft_logits is not None:  # else the draft was certain
            ratio -= self.draft_logits[rows, tokens] - self.draft_logits.logsumexp(dim=-1)[rows]
        uniform = torch.from_numpy(philox_uniform(self.seeds, self.positions))
        return ratio > uniform.log()[rows]

    def draw(
        self,
        rows: torch.Tensor,  # [num_reqs] int64
        refused: torch.Tensor,  # [num_reqs] int64, the draft that was refused; -1: none was
    ) -> torch.Tensor:
        """Returns tokens [num_reqs] int64, drawn from p or, where a draft was refused, from
        max(p - q, 0), where q is 1 for a best guess."""
        logits = self.logits[rows]
        refusing = torch.nonzero(refused >= 0)[:, 0]
        if self.draft_logits is None:
            logits[refusing, refused[refusing]] = float("-inf")
        else:
            log_p = logits[refusing].log_softmax(dim=-1)
            log_q = self.draft_logits[rows[refusing]].log_softmax(dim=-1)
            remainder = torch.log1p(-torch.exp(log_q - log_p).clamp(max=1.0))
            logits[refusing] = torch.where(log_q < log_p, log_p + remainder, float("-inf"))
        seeds, positions = self.seeds[rows.numpy(), None], self.positions[rows.numpy(), None]
        noise = gumbel_noise(seeds, positions, np.arange(logits.shape[1]), self.use_fp64)
        return (logits + torch.from_numpy(noise)).argmax(dim=-1)
