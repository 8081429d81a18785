"""What compiled operations return that PyTorch knows no shapes of: those that do more than fill
what they were given."""

from collections.abc import Callable
from typing import Any

import torch


def _schedule_fa3(batch_size: int, *args: Any) -> torch.Tensor:
    """FlashAttention-3's, as long as the buffer that vLLM keeps for it."""
    like = next(each for each in args if isinstance(each, torch.Tensor))
    size = 1 + (batch_size + 3) // 4 * 4
    return torch.empty(size, dtype=torch.int32, device=like.device)


def _attend_fa3(*args: Any) -> list[torch.Tensor]:
    query, output = args[0], args[6]
    sums = _sums(query)
    return [torch.empty_like(query) if output is None else output, sums, sums, sums]


def _attend_fa2(*args: Any) -> list[torch.Tensor]:
    query, output = args[0], args[3]
    return [torch.empty_like(query) if output is None else output, _sums(query)]


def _sums(query: torch.Tensor) -> torch.Tensor:
    shape = (query.shape[1], query.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=query.device)


def _multiply_experts(*args: Any) -> torch.Tensor:
    """Marlin's."""
    rows, output, top_k, num_rows, width = args[0], args[1], args[14], args[17], args[18]
    return rows.new_empty(num_rows * top_k, width) if output is None else output


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


RETURNS: dict[str, Callable[..., Any]] = {
    "_vllm_fa3_C::get_scheduler_metadata": _schedule_fa3,
    "_vllm_fa3_C::fwd": _attend_fa3,
    "_vllm_fa2_C::varlen_fwd": _attend_fa2,
    "_C::weak_ref_tensor": _same,
}


def correct() -> None:
    """What vLLM tells PyTorch of Marlin's experts takes fewer arguments than they do."""
    torch.library.register_fake(
        "_moe_C::moe_wna16_marlin_gemm", _multiply_experts, allow_override=True
    )
