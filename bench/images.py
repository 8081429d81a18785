"""What images cost: the tower and a prompt's prefill beside transformers, and text beside a server
that has no tower.

    python -m bench.images

Random weights in fp32 (`images_shape.py`), the same in all systems, which take turns. Before that,
one denoising step behind an image is compared with transformers', position by position; text must
be answered the same with the tower and without it. The last line is JSON, which also lands in
bench/results/<machine>/.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness, images_shape
from bench.system import Call, taking_turns
from tests import tolerances

OURS, TRANSFORMERS, WITHOUT = "vllm-dllm", "transformers", "vllm-dllm without the tower"
CONCURRENCIES = (1, 8)
CHECKED = 4  # prompts
PARTS = ("tower_ms", "prefill_ms")  # the latter with the tower


def require_same_step(
    read: Sequence[Sequence[tuple[list[int], list[float]]]],  # ours, the most probable tokens
    expected: Sequence[Sequence[Sequence[float]]],  # [prompt][position][token]
) -> float:
    """How far log-probabilities are off at most; raises Refused if that is too far."""
    off = [
        abs(score - row[token])
        for positions, rows in zip(read, expected, strict=True)
        for (tokens, scores), row in zip(positions, rows, strict=True)
        for token, score in zip(tokens, scores, strict=True)
    ]
    if not all(each <= tolerances.LOGPROB for each in off):  # one that is no number is not
        raise harness.Refused(
            f"log-probabilities behind images are off by {max(off):.2g}; at most "
            f"{tolerances.LOGPROB:g} is allowed."
        )
    return max(off)


def require_same_text(runs: dict[str, dict[str, Any]]) -> None:
    if runs[OURS]["outputs"] != runs[WITHOUT]["outputs"]:
        raise harness.Refused("text is answered differently with and without the tower.")


def prefills(call: Call, concurrency: int, rounds: int) -> dict[str, Any]:
    """[system][part] -> ms of all requests together, and how many times as fast as transformers."""
    runs: dict[str, list[dict[str, float]]] = {OURS: [], TRANSFORMERS: []}
    for number in range(rounds + 1):
        for name, own in runs.items():
            own.append(call(name, "prefill", count=concurrency, seed=1 + number))
    found: dict[str, Any] = {
        name: {part: harness.spread([run[part] for run in own[1:]]) for part in PARTS}
        for name, own in runs.items()  # the first round warms up
    }
    for part in PARTS:
        found[f"times transformers, {part}"] = statistics.median(
            theirs[part] / ours[part]
            for ours, theirs in zip(runs[OURS][1:], runs[TRANSFORMERS][1:], strict=True)
        )
    print(f"{concurrency} at once: {found}", flush=True)
    return found


def texts(call: Call, concurrency: int, rounds: int) -> dict[str, Any]:
    """[system] -> tokens a second of text alone, and the tower's share of the speed."""
    speeds: dict[str, list[float]] = {OURS: [], WITHOUT: []}
    for number in range(rounds + 1):
        runs = {name: call(name, "write", count=concurrency, seed=number) for name in speeds}
        require_same_text(runs)
        for name, own in speeds.items():
            own.append(runs[name]["tokens_per_second"])
    found: dict[str, Any] = {name: harness.spread(own[1:]) for name, own in speeds.items()}
    found["times without the tower"] = statistics.median(
        one / other for one, other in zip(speeds[OURS][1:], speeds[WITHOUT][1:], strict=True)
    )
    print(f"text, {concurrency} at once: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="try it without compiling")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    report: dict[str, Any] = {"bench": "images", "machine": harness.machine()}
    with tempfile.TemporaryDirectory() as temporary:
        images_shape.write(Path(temporary))
        engine, own = "bench.images_engine:ImagesEngine", {"checkpoint": temporary}
        commands = {
            OURS: (engine, own | {"eager": args.eager}),
            WITHOUT: (engine, own | {"eager": args.eager, "sees": False}),
            TRANSFORMERS: ("bench.images_transformers:Prefills", own),
        }
        with taking_turns(commands) as (_, call):
            read, expected = (
                call(name, "read", count=CHECKED, seed=0) for name in (OURS, TRANSFORMERS)
            )
            report["logprobs_off_at_most"] = require_same_step(read, expected)
            report["images"] = {str(n): prefills(call, n, args.rounds) for n in CONCURRENCIES}
            report["text"] = {str(n): texts(call, n, args.rounds) for n in CONCURRENCIES}
    harness.publish(report, args.out / "images.json")


if __name__ == "__main__":
    main()
