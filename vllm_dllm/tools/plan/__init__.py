"""How many requests of a checkpoint fit a GPU: `vllm-dllm plan`.

These are its choices, apart from what takes seconds to load: each command's help reads them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    memory_gib: float
    """What its driver offers, by the data sheet."""
    published: int | None = None
    """Tokens a second of one request of DiffusionGemma 26B in FP8, as vLLM published them for its
    own version. Nobody has measured ours."""


GPUS = {
    "a100": GPU(79.2),
    "l40s": GPU(44.5),
    "h100": GPU(79.2, 1008),
    "h200": GPU(139.8, 1288),
    "b200": GPU(178.4),
}
ELEMENT_BYTES = {"auto": 2, "fp8": 1}
"""The size of a key's or a value's element, by --kv-cache-dtype."""
