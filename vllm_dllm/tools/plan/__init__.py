"""`vllm-dllm plan`: computes how many requests of a checkpoint a GPU has room for.

This file has the choices of the command's options. The help of all commands needs them, and
`capacity.py` takes seconds to load.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A kind of GPU that `vllm-dllm plan` knows."""

    memory_gib: float
    """Memory by the data sheet, in GiB, as the driver reports it."""
    token_budget: int
    """The most tokens of a step of `vllm serve`: vLLM's default on this GPU."""
    published_tokens_per_s: int | None = None
    """Tokens per second of one request of DiffusionGemma 26B in FP8, as vLLM published them for its
    own version; None: not published."""


GPUS = {
    "a100": GPU(79.2, 2048),
    "l40s": GPU(44.5, 2048),
    "h100": GPU(79.2, 8192, 1008),
    "h200": GPU(139.8, 8192, 1288),
    "b200": GPU(178.4, 16384),
}
