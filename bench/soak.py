"""A server under an hour of mixed requests: what grows, and whether answers take longer.

    python -m bench.soak --minutes 60

64 clients ask for answers of several kinds. Memory and descriptors of all the
server's processes are read every ten seconds; growth is what they gain after the first sixth of the
time, drift the change of the median latency from then to the end, and of the processor time that an
answer takes, which other jobs on the machine change less. See bench/README.md.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from bench import harness
from bench.clients import Answered, asking, serving

SAMPLE_S = 10.0
KINDS: list[dict[str, Any]] = [
    {"max_tokens": 20},
    {"max_tokens": 128},
    {"max_tokens": 64, "n": 2},
    {"max_tokens": 64, "logprobs": 3, "frequency_penalty": 0.4},
    {"max_tokens": 40, "bad_words": ["a b"], "logit_bias": {"7": 2.0}},
    {"max_tokens": 4, "prompt_logprobs": 1},
    {"max_tokens": 200, "ignore_eos": True},
]


def body(client: int, number: int) -> dict[str, Any]:
    chance = random.Random(f"{client} {number}")
    prompt = [chance.randrange(10, 500) for _ in range(chance.choice([3, 40, 300]))]
    return {"prompt": prompt, "seed": number} | KINDS[(client + number) % len(KINDS)]


def sample(pid: int) -> dict[str, float]:
    """Of a process and all that it started."""
    leader = psutil.Process(pid)
    processes = [leader, *leader.children(recursive=True)]
    return {
        "at": time.monotonic(),
        "memory_mib": sum(p.memory_info().rss for p in processes) / 2**20,
        "descriptors": sum(p.num_fds() for p in processes),
        "threads": sum(p.num_threads() for p in processes),
        "processes": len(processes),
        "processor_s": sum(sum(p.cpu_times()[:2]) for p in processes),
    }


def growth(samples: list[dict[str, float]], name: str) -> dict[str, float]:
    """Between the medians of the first and the last fifth."""
    fifth = max(1, len(samples) // 5)
    first, last = (
        statistics.median(s[name] for s in some) for some in (samples[:fifth], samples[-fifth:])
    )
    return {"first": first, "last": last, "growth": last - first}


def drift(answers: list[Answered], start: float, end: float) -> dict[str, float]:
    """Of the median latency, from the first fifth of the time to the last."""
    fifth = (end - start) / 5
    early = [a.seconds for a in answers if start <= a.at < start + fifth]
    late = [a.seconds for a in answers if end - fifth <= a.at < end]
    first, last = 1000 * statistics.median(early), 1000 * statistics.median(late)
    return {"first_p50_ms": first, "last_p50_ms": last, "percent": 100 * (last / first - 1)}


def work(samples: list[dict[str, float]]) -> dict[str, float]:
    """Processor time of an answer, in the first and in the last fifth."""
    fifth = max(1, len(samples) // 5)
    first, last = (
        1000
        * (some[-1]["processor_s"] - some[0]["processor_s"])
        / max(1, some[-1]["answers"] - some[0]["answers"])
        for some in (samples[: fifth + 1], samples[-fifth - 1 :])
    )
    return {"first_ms": first, "last_ms": last, "percent": 100 * (last / first - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/diffusiongemma-tiny"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine, samples = harness.machine(), []
    bodies = [lambda number, client=i: body(client, number) for i in range(args.clients)]
    with (
        serving(args.checkpoint) as server,
        asking(server.port, args.checkpoint, bodies) as answers,
    ):
        end = time.monotonic() + 60 * args.minutes
        start = end - 50 * args.minutes  # after the first sixth
        while time.monotonic() < end:
            time.sleep(min(SAMPLE_S, max(0.0, end - time.monotonic())))
            server.check_alive()
            num_answers = sum(map(len, answers))
            now = sample(server.pid) | {"answers": num_answers}
            samples.append(now)
            print(
                f"{now['memory_mib']:.0f} MiB, {now['descriptors']:.0f} descriptors, "
                f"{num_answers} answers",
                flush=True,
            )
        everything = [answer for some in answers for answer in some]
    settled = [s for s in samples if s["at"] >= start]
    found = {name: growth(settled, name) for name in ("memory_mib", "descriptors", "threads")}
    found["processor"] = work(settled)
    found["latency"] = drift([a for a in everything if a.status == 200], start, end)
    report = {
        "bench": "soak",
        "machine": machine,
        "minutes": args.minutes,
        "clients": args.clients,
        "answers": {str(k): v for k, v in Counter(a.status for a in everything).items()},
        "found": found,
        "samples": samples,
    }
    for name, values in found.items():
        print(name, {key: round(value, 1) for key, value in values.items()})
    harness.publish(report, args.out / "soak.json")


if __name__ == "__main__":
    main()
