"""What the best width of each prompt would give: the most that one choice per request can."""

from pathlib import Path
from typing import Any


def best_widths(
    target: Path,
    drafter: Path,
    prompts: list[list[int]],
    answers: list[list[int]],  # the target's greedy tokens
    num_drafts: int,
) -> dict[str, Any]:
    """τ of every fixed verify width of `num_drafts` drafted tokens, and of the width that needs the
    fewest verifications for each prompt: offline, in fp32."""
    from vllm_dllm.tools.drafter.measurements import mean_length, replay
    from vllm_dllm.tools.drafter.reference import load_drafter, load_target

    replayed = replay(
        load_target(target, "cpu"), load_drafter(drafter), prompts, answers, num_drafts
    )
    widths = range(1, num_drafts + 1)
    best = [min((one.emitted_lengths(width) for width in widths), key=len) for one in replayed]
    return {
        "tau": mean_length(best),
        "tau_of_fixed": {
            str(width): mean_length([one.emitted_lengths(width) for one in replayed])
            for width in widths
        },
    }
