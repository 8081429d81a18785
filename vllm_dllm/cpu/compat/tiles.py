"""The matrix tiles of Intel's processors (AMX), which Linux gives to a process that asks."""

import torch


def ask_for_tiles() -> None:
    """Asks, as PyTorch does before its own first product on tiles. vLLM's attention in bf16 uses
    them without asking: where a server's first step was too small for such a product, it ended the
    worker (SIGILL)."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
