"""Runs the numeric tests as other processors compute: `make test-numerics`.

Processors differ in the width of their vectors, in the kernels that PyTorch, MKL, oneDNN, OpenBLAS,
NumPy and vLLM choose for them, and so in the order of every sum. Each of these libraries can be
told to compute as on a smaller processor. All get the same level. OpenBLAS, which multiplies
matrices in Triton's interpreter, also has kernels by make of processor.

Six runs cover every level and every make, each with one thread and with two. Random numbers differ
with the level, too: below AVX2 PyTorch draws others from the same seed, so the tests see other
inputs.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASELINE, AVX2, AVX512 = "default", "avx2", "avx512"
# Level -> its name in PyTorch, MKL and oneDNN. MKL and oneDNN have nothing below SSE 4.
NAMES = {
    BASELINE: ("default", "SSE4_2", "SSE41"),
    AVX2: ("avx2", "AVX2", "AVX2"),
    AVX512: ("avx512", "AVX512", "AVX512_CORE"),
}
# Flags of /proc/cpuinfo that a level, or a make's kernels in OpenBLAS, need.
NEEDED: dict[str, set[str]] = {
    BASELINE: set(),
    AVX2: {"avx2", "fma"},
    AVX512: {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
}
NEEDED |= {"Haswell": NEEDED[AVX2], "Zen": NEEDED[AVX2], "SkylakeX": NEEDED[AVX512]}
# Short sums with other roundings in most settings: a reader sees which differ.
PROBE = """
import hashlib, numpy as np, torch
x = np.random.default_rng(0).random((96, 300), dtype=np.float32) - np.float32(0.5)
t = torch.from_numpy(x)
bf16 = t.bfloat16()
for found in (t @ t.T, (bf16 @ bf16.T).float(), t.exp().sum(1), x @ x.T, np.log2(x + 1)):
    print(hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()[:4])
"""
PROBED = ("matmul", "bf16", "exp", "OpenBLAS", "NumPy")


# vLLM's cache of facts about model classes. To find one out takes a process 15 s.
CACHES = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
INSPECTED = Path(os.environ.get("VLLM_CACHE_ROOT", CACHES / "vllm"), "modelinfos")


@dataclass(frozen=True)
class Setting:
    """How one run computes."""

    level: str
    make: str  # of processor, in OpenBLAS
    threads: int

    def __str__(self) -> str:
        return f"{self.level}, {self.make}, {self.threads} thread{'s'[: self.threads - 1]}"

    def missing(self) -> set[str]:
        """Returns the flags that this processor lacks for the setting."""
        return (NEEDED[self.level] | NEEDED[self.make]) - processor_flags()

    def environment(self, cache: Path) -> dict[str, str]:
        """Returns the environment variables of a run. `cache`: folder for what is compiled."""
        aten, mkl, onednn = NAMES[self.level]
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        # With one thread, each process of the tests chooses a core of its own.
        bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if cores[1:] else {}
        return {
            **bound,
            "ATEN_CPU_CAPABILITY": aten,
            "MKL_ENABLE_INSTRUCTIONS": mkl,
            "ONEDNN_MAX_CPU_ISA": onednn,
            "OPENBLAS_CORETYPE": self.make,
            "NPY_DISABLE_CPU_FEATURES": " ".join(numpy_features_above(self.level)),
            "TESTED_CPU_LEVEL": self.level,  # tests/conftest.py: vLLM's kernels
            **dict.fromkeys(threads, str(self.threads)),
            # What was compiled for one level is wrong for another.
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }


MATRIX = (
    Setting(BASELINE, "Haswell", 1),
    Setting(BASELINE, "SkylakeX", 2),
    Setting(AVX2, "Zen", 1),
    Setting(AVX2, "Haswell", 2),
    Setting(AVX512, "SkylakeX", 1),
    Setting(AVX512, "Zen", 2),
)
# For CI: the setting that differs most from the machines we work on, without tests that take long
# or are exact. Whole answers of the shipped models take a third of the time.
SHORT = (Setting(BASELINE, "SkylakeX", 1),)
LEFT_OUT = "not visibility and not visits and not held_out_prompts"
SHORT_TESTS = ("-m", "numerics and not slow", "-k", LEFT_OUT, "tests/unit")


def processor_flags() -> set[str]:
    """Returns the flags of this processor."""
    return set(cpuinfo("flags"))


def cpuinfo(field: str) -> list[str]:
    """Returns the words of the first line named `field` in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.split()
    return []


def numpy_features_above(level: str) -> list[str]:
    """Returns the features above `level` that NumPy would use here."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    above = {BASELINE: "", AVX2: "AVX512", AVX512: "never"}[level]
    return [f for f in __cpu_dispatch__ if f.startswith(above) and __cpu_features__[f]]


def describe_machine() -> str:
    """Returns processor and versions in one line."""
    import numpy
    import torch

    wide = sorted(processor_flags() & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    return (
        f"{' '.join(cpuinfo('model name'))}, {len(os.sched_getaffinity(0))} cores, "
        f"{' '.join(wide)}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {numpy.__version__}"
    )


def run(setting: Setting, pytest_arguments: Sequence[str], logs: Path) -> tuple[bool, str]:
    """Runs the tests in a setting. Returns whether they passed, and a line of the table."""
    if missing := setting.missing():
        return True, f"{setting}: NOT RUN, this processor has no {', '.join(sorted(missing))}"
    if setting.threads > len(os.sched_getaffinity(0)):
        return True, f"{setting}: NOT RUN, this machine has one core"
    log = logs / f"{setting.level}-{setting.make}-{setting.threads}.log"
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | setting.environment(Path(cache))
        if INSPECTED.is_dir():
            shutil.copytree(INSPECTED, Path(cache, "vllm", INSPECTED.name))
        probe = [sys.executable, "-c", PROBE]
        rounded = subprocess.run(
            probe, env=environment, check=True, capture_output=True, text=True
        ).stdout.split()
        # Files side by side. Of several threads most wait most of the time.
        workers = min(4, len(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--numprocesses", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        started = time.monotonic()
        with log.open("w") as file:
            process = subprocess.run(
                [*command, *pytest_arguments],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    closing = (line for line in reversed(lines) if " in " in line and line[:1].isdigit())
    summary = next(closing, "no tests ran").partition(" in ")[0]
    words = [f"{name} {bits}" for name, bits in zip(PROBED, rounded, strict=True)]
    took = f"{(time.monotonic() - started) / 60:.1f} min"
    colour = "green" if process.returncode == 0 else f"RED (pytest ended with {process.returncode})"
    return process.returncode == 0, f"{setting}: {colour}, {summary}, {took}; {', '.join(words)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="one setting, fast tests (for CI)")
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--logs", type=Path, help="folder for pytest's output")
    parser.add_argument("arguments", nargs="*", help="for pytest, behind --")
    args = parser.parse_args()
    settings = [s for s in (SHORT if args.short else MATRIX) if (args.only or "") in str(s)]
    if not settings:
        parser.error(f"no setting contains {args.only!r}: {'; '.join(map(str, MATRIX))}")
    chosen = SHORT_TESTS if args.short else ("-m", "numerics")
    logs = args.logs or Path(tempfile.mkdtemp(prefix="numerics-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{describe_machine()}\npytest's output: {logs}", flush=True)
    results = []
    for setting in settings:
        results.append(run(setting, [*chosen, *args.arguments], logs))
        print(results[-1][1], flush=True)
    print("\nNumeric tests, and the last digits of some sums:", flush=True)
    for _, line in results:
        print(f"  {line}")
    return 0 if all(is_green for is_green, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
