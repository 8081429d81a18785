"""What differs between the known versions in vLLM's kernels.

Native kernels take the arguments of the newest. What a version adds at the end is left out by older
ones; here is the rest.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from vllm_dllm.compat import version

Launch = Callable[..., None]


def dflash_inputs(native: Launch, vllm_version: str) -> Launch:
    """Leaves out which rows of a batch of drafts are padding, before 0.33 asks for it."""
    if version.is_at_least("0.33", vllm_version):
        return native

    def without_padding(
        grid: tuple[int, ...], ids: Any, positions: Any, *others: Any, **options: Any
    ) -> None:
        native(grid, ids, positions, None, *others, **options)

    own = inspect.signature(native)
    kept = [p for p in own.parameters.values() if p.name != "out_is_padding"]
    without_padding.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
    return without_padding


def draft_seeds(
    seeds: torch.Tensor,  # [num_rows] int64
    columns: torch.Tensor,  # [num_rows] int64, of which drafted position the row's logits are kept
) -> torch.Tensor:
    """What the noise of drafts is drawn with: from 0.33 on each position has a seed of its own."""
    return seeds ^ (columns << 32) if version.is_at_least("0.33") else seeds
