"""Differences of vLLM's kernels between supported versions.

Native kernels take the parameters of the newest version. Parameters at the end may be absent in an
older one; other differences are here.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from vllm_dllm.compat import version


def adapt_dflash_kernel(native: Callable[..., None], vllm_version: str) -> Callable[..., None]:
    """Returns `native`, our version of vLLM's kernel, with the parameters that the kernel has in
    `vllm_version`: before 0.33 it has no `out_is_padding`, which is then None."""
    if version.is_at_least("0.33", vllm_version):
        return native
    own = inspect.signature(native)
    missing = list(own.parameters).index("out_is_padding")

    @wraps(native)
    def without_padding(*arguments: Any, **options: Any) -> None:
        native(*arguments[:missing], None, *arguments[missing:], **options)

    kept = [p for p in own.parameters.values() if p.name != "out_is_padding"]
    without_padding.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
    return without_padding


def draft_seeds(
    seeds: torch.Tensor,  # [num_rows] int64
    columns: torch.Tensor,  # [num_rows] int64, of which drafted position the row's logits are kept
) -> torch.Tensor:
    """Returns the seeds [num_rows] int64 of the noise that drafts are drawn with. From vLLM 0.33
    on, each drafted position has a seed of its own."""
    return seeds ^ (columns << 32) if version.is_at_least("0.33") else seeds
