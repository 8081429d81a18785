"""Tests of kernels on a GPU, several processes at once: most of the time is spent compiling.

    python -m bench.lease.kernel_tests tests/unit/attention_kernels ...

Prints a line for each file of tests, and one of JSON.
"""

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.harness import ROOT

AT_ONCE = 8
COUNTS = re.compile(r"(\d+) (passed|failed|error|skipped)")


def run(file: Path, marked: list[str]) -> tuple[dict[str, int], str]:
    """How many of its tests passed, failed and so on; and the end of what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *marked, str(file)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (
        process.stdout.strip().splitlines() or process.stderr.strip().splitlines() or ["nothing"]
    )
    counts = {kind: int(number) for number, kind in COUNTS.findall(lines[-1])}
    if process.returncode not in (0, 5) and not counts.get("failed"):  # 5: no test is marked so
        counts["error"] = max(1, counts.get("error", 0))
    return counts, "\n".join(lines[-8:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--without-gpu", action="store_true", help="tests that need none")
    args = parser.parse_args()
    marked = [] if args.without_gpu else ["-m", "gpu"]
    files = [file for path in args.paths for file in _files(path, all_of_them=args.without_gpu)]
    total: dict[str, int] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for file, (counts, end) in zip(
            files, pool.map(lambda file: run(file, marked), files), strict=True
        ):
            for kind, number in counts.items():
                total[kind] = total.get(kind, 0) + number
            text = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            print(f"{file}: {text or 'none'}", flush=True)
            if counts.get("failed") or counts.get("error"):
                print(end, flush=True)
    print(json.dumps({"tests": total, "files": len(files)}))
    sys.exit(bool(total.get("failed") or total.get("error")))


def _files(path: Path, all_of_them: bool) -> list[Path]:
    """Those with a test that is marked `gpu`."""
    found = [path] if path.is_file() else sorted((ROOT / path).rglob("test_*.py"))
    return [file for file in found if all_of_them or "mark.gpu" in file.read_text()]


if __name__ == "__main__":
    main()
