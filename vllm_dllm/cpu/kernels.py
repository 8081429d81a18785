"""The native version of each of vLLM's kernels, by the kernel's full name."""

from typing import Any

NATIVE_KERNELS: dict[str, Any] = {}
