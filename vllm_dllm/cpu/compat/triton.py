"""vLLM's stand-in for Triton, where Triton has no backend for this machine; and what differs in
vLLM's kernels between the known versions.

Native kernels take the arguments of the newest. What a version adds at the end is left out by older
ones; at the end of this file is the rest.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import vllm.triton_utils as triton_utils
from vllm.triton_utils.importing import TritonLanguagePlaceholder, TritonPlaceholder

from vllm_dllm.compat import version
from vllm_dllm.compat.patching import replace


def has_triton() -> bool:
    return triton_utils.HAS_TRITON


def uses_triton_placeholder(module: ModuleType) -> bool:
    """Whether `module` was loaded with vLLM's stand-in for Triton."""
    return any(isinstance(value, TritonPlaceholder) for value in vars(module).values())


def set_triton_jit(jit: Callable[..., Any]) -> None:
    """Makes `jit` the `@triton.jit` of modules loaded from now on, and fills in the function of
    Triton that runner v2 calls and vLLM's stand-in lacks."""
    is_stand_in = isinstance(triton_utils.triton, TritonPlaceholder)
    assert is_stand_in, "vLLM has Triton: its kernels can be launched"
    replace("triton_utils:triton.jit", lambda stock: jit)
    replace(
        "triton_utils:triton.next_power_of_2",
        lambda stock: lambda n: 1 << (n - 1).bit_length() if n > 0 else n,
    )


def real_triton_module(placeholder: object) -> ModuleType | None:
    """The module of Triton that `placeholder` stands for, or None if it is something else."""
    if placeholder is triton_utils.tl:
        import triton.language as tl

        return tl
    if placeholder is triton_utils.tldevice:
        from triton.language.extra import libdevice

        return libdevice
    return None


def is_placeholder_constexpr(annotation: object) -> bool:
    """Whether `annotation` was written `tl.constexpr` in a module loaded without Triton."""
    tl = triton_utils.tl
    return isinstance(tl, TritonLanguagePlaceholder) and annotation is tl.constexpr


def dflash_inputs(native: Callable[..., None], vllm_version: str) -> Callable[..., None]:
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
