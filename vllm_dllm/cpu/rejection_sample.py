"""Verification of drafts on CPUs, in place of vLLM's `rejection_sample`."""

from typing import Any

import numpy as np
import torch

from vllm_dllm.cpu.compat.runner import stock_rejection_sample
from vllm_dllm.cpu.random_numbers import gumbel, philox_uniform
from vllm_dllm.cpu.verification import Draws, verify


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
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    **watermarking: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [num_reqs, num_speculative_steps + 1] int64 and how many of them count, [num_reqs]
    int32, with vLLM's own random numbers. What `verify` lacks runs in Triton's interpreter."""
    if synthetic_conditional_rates is not None or use_block_verification or watermarking:
        return stock_rejection_sample(
            target_logits,
            draft_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            expanded_idx_mapping,
            expanded_local_pos,
            temperature,
            seed,
            num_speculative_steps,
            synthetic_conditional_rates,
            use_fp64,
            use_block_verification,
            **watermarking,
        )
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
    """vLLM's random numbers of each row."""
    seeds, positions, vocabulary = seed.numpy(), pos.numpy(), np.arange(vocab_size)

    def noise(rows: torch.Tensor) -> torch.Tensor:
        chosen = rows.numpy()
        return torch.from_numpy(
            gumbel(seeds[chosen, None], positions[chosen, None], vocabulary, use_fp64)
        )

    return Draws(uniform=lambda: torch.from_numpy(philox_uniform(seeds, positions)), gumbel=noise)
