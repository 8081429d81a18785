"""Linear verification: how many drafts of each request the target accepts, and the token that it
adds.

A request has a row of logits for each draft and one more. Row i is the target's distribution of the
token at draft i, so the row of the first refused draft, or the last row, yields a token of the
target's own. Greedy requests keep drafts that equal the target's best token. Sampled requests
follow Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(arXiv:2211.17192): draft x is kept with probability min(1, p(x) / q(x)); where it is refused, the
token is drawn from max(p - q, 0), normalised, and so every token is distributed as p. A drafter
that took its best guess has q(x) = 1.

R = requests, N = rows of all of them, V = vocabulary, W = most rows a request has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.cpu.random_numbers import gumbel_noise, philox_uniform


@dataclass(frozen=True)
class Draws:
    """Random numbers of sampled requests. The functions are called only if there are sampled
    requests."""

    uniform: Callable[[], torch.Tensor]
    """Returns [N] fp32 in (0, 1), one for each row's draft."""
    gumbel: Callable[[torch.Tensor], torch.Tensor]
    """Returns noise [R, V] for the rows [R] that yield a token."""


def verify(
    logits: torch.Tensor,  # [N, V] fp32 of the target, after temperature and filters
    drafts: torch.Tensor,  # [N] int: the input token of each row; a draft but in a request's first
    # row, -1 where there is none to accept
    cu_num_logits: torch.Tensor,  # [R + 1] int32, bounds of each request's rows, at least one
    num_columns: int,  # W
    greedy: torch.Tensor,  # [R] bool
    draws: Draws,
    draft_logits: torch.Tensor | None = None,  # [N, V] fp32, after temperature, that each row's
    # draft was drawn from; None: drafts are best guesses
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens [R, W] int64: each request's drafts up to the first that is refused, and then
    the target's token. Also returns how many of a request's tokens count, [R] int32, at least
    one."""
    starts, ends = cu_num_logits[:-1].long(), cu_num_logits[1:].long()
    columns = torch.arange(num_columns, device=logits.device)
    rows = (starts[:, None] + columns).clamp(max=len(logits) - 1)
    following = (rows + 1).clamp(max=len(logits) - 1)
    has_draft = starts[:, None] + columns < ends[:, None] - 1
    proposed = torch.where(has_draft, drafts[following].long(), -1)

    best = logits.argmax(dim=-1)
    accepted = best[rows] == proposed
    some_sampled = not bool(greedy.all())
    if some_sampled:
        ratio = logits[rows, tokens := proposed.clamp(min=0)] - logits.logsumexp(dim=-1)[rows]
        if draft_logits is not None:  # else the draft was certain
            ratio -= draft_logits[rows, tokens] - draft_logits.logsumexp(dim=-1)[rows]
        accepted = torch.where(greedy[:, None], accepted, ratio > draws.uniform().log()[rows])
    num_accepted = (accepted & (proposed >= 0)).int().cumprod(dim=1).sum(dim=1)

    last = starts + num_accepted
    final = best[last]
    if some_sampled:
        residual = logits[last].clone()
        refused = proposed.gather(1, num_accepted[:, None]).squeeze(1)
        _subtract_draft_distribution(
            residual, refused, None if draft_logits is None else draft_logits[last]
        )
        final = torch.where(greedy, final, (residual + draws.gumbel(last)).argmax(dim=-1))
    tokens = torch.where(columns < num_accepted[:, None], proposed, final[:, None])
    return tokens, (num_accepted + 1).int()


def _subtract_draft_distribution(
    logits: torch.Tensor,  # [R, V], becomes log max(p - q, 0) up to a constant
    refused: torch.Tensor,  # [R] the draft that was refused, -1 where none was: p stays
    draft_logits: torch.Tensor | None,  # [R, V]
) -> None:
    """Changes `logits` in place to those of max(p - q, 0), up to a constant, in rows that refused a
    draft. `draft_logits` None: q is 1 for the refused draft."""
    some = torch.nonzero(refused >= 0)[:, 0]
    if draft_logits is None:
        logits[some, refused[some]] = float("-inf")
        return
    log_p, log_q = logits[some].log_softmax(dim=-1), draft_logits[some].log_softmax(dim=-1)
    remainder = torch.log1p(-torch.exp(log_q - log_p).clamp(max=1.0))
    logits[some] = torch.where(log_q < log_p, log_p + remainder, float("-inf"))


def rejection_sample(
    target_logits: torch.Tensor,  # [num_logits, V] fp32
    draft_logits: torch.Tensor | None,  # [max_num_reqs, num_speculative_steps, V], no temperature
    draft_sampled: torch.Tensor,  # [num_logits] int32
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32
    pos: torch.Tensor,  # [num_logits] int64
    idx_mapping: torch.Tensor,  # [num_reqs] int64, batch row -> slot
    expanded_idx_mapping: torch.Tensor,  # [num_logits] int64, logit row -> slot
    expanded_local_pos: torch.Tensor,  # [num_logits] int32
    temperature: torch.Tensor,  # [max_num_reqs] fp32
    seed: torch.Tensor,  # [max_num_reqs] int64
    num_speculative_steps: int,
    use_fp64: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verifies drafts as vLLM's function of this name does, with the same random numbers. Returns
    tokens [num_reqs, num_speculative_steps + 1] int64, and how many of them count, [num_reqs]
    int32."""
    if draft_logits is not None:  # a target's vocabulary may be padded further than its drafter's
        target_logits = target_logits[:, : draft_logits.shape[-1]]
    draws = _draws(seed[expanded_idx_mapping], pos, target_logits.shape[1], use_fp64)
    greedy = temperature[idx_mapping] == 0
    drawn_from = None
    if draft_logits is not None and not bool(greedy.all()):
        # A request's last row has no draft; it borrows the one before.
        steps = expanded_local_pos.long().clamp(max=num_speculative_steps - 1)
        temperatures = temperature[expanded_idx_mapping]
        temperatures[temperatures == 0] = 1.0
        drawn_from = draft_logits[expanded_idx_mapping, steps].float() / temperatures[:, None]
    return verify(
        target_logits,
        draft_sampled,
        cu_num_logits,
        num_speculative_steps + 1,
        greedy,
        draws,
        drawn_from,
    )


def _draws(
    seed: torch.Tensor,  # [num_logits] int64
    pos: torch.Tensor,  # [num_logits] int64
    vocab_size: int,
    use_fp64: bool,
) -> Draws:
    """Returns Draws with vLLM's random numbers for each row, by seed and position."""
    seeds, positions, vocabulary = seed.numpy(), pos.numpy(), np.arange(vocab_size)

    def noise(rows: torch.Tensor) -> torch.Tensor:
        chosen = rows.numpy()
        return torch.from_numpy(
            gumbel_noise(seeds[chosen, None], positions[chosen, None], vocabulary, use_fp64)
        )

    return Draws(uniform=lambda: torch.from_numpy(philox_uniform(seeds, positions)), gumbel=noise)
