"""Tests of kernels, those of a folder that run on a GPU if there is one, many processes at once:
most of the time is spent compiling.

    python -m bench.lease.kernel_tests tests/unit/attention_kernels ...

Prints what pytest says of tests that fail, and a line of JSON.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from bench.harness import ROOT

AT_ONCE = 12
COUNTS = re.compile(r"(\d+) (passed|failed|error|skipped)")
ON_A_GPU = re.compile(r"mark\.gpu|cuda\.is_available|\bDEVICE\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    args = parser.parse_args()
    files = [file for path in args.paths for file in _files(ROOT / path)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-n", str(args.at_once), "--dist", "worksteal", "--durations=5", *map(str, files)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (process.stdout + process.stderr).strip().splitlines()
    print("\n".join(lines[-60:]), flush=True)
    closing = "".join(process.stdout.strip().splitlines()[-1:])
    counts = {kind: int(number) for number, kind in COUNTS.findall(closing)}
    print(json.dumps({"tests": counts, "files": len(files)}))
    sys.exit(process.returncode)


def _files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return [file for file in found if ON_A_GPU.search(file.read_text())]


if __name__ == "__main__":
    main()
