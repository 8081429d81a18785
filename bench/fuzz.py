"""Odd requests to servers with and without a drafter, and to one that sees: how they were answered.

Ends with status 1 if an answer breaks its request.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import harness
from tests.faults.fuzz import SERVERS, attack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=6000, help="of all servers together")
    parser.add_argument("--seed", type=int, default=0, help="other requests")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    figures: dict[str, Any] = {"bench": "fuzz", "machine": harness.machine(), "seed": args.seed}
    num_broken = 0
    for name in SERVERS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            fuzz = attack(name, args.requests // len(SERVERS), args.seed, Path(folder))
        for broken in fuzz.broken:
            print(f"{name}: {broken}", flush=True)
        num_broken += len(fuzz.broken)
        figures[name] = {
            "requests": fuzz.statuses.total(),
            "by_status": {str(k): v for k, v in sorted(fuzz.statuses.items())},
            "broken_answers": len(fuzz.broken),
            "minutes": round((time.monotonic() - started) / 60, 1),
        }
        print(f"{name}: {figures[name]}", flush=True)
    harness.publish(figures, args.out / "fuzz.json")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
