"""The host's time a step, of our DiffusionGemma and of stock vLLM's, on the same requests."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.cuda_build import checkpoints
from tests.cuda_build.device import GpuDevice
from tests.cuda_build.engine import Engine

WARM, TIMED = 8, 16  # steps; each canvas takes four
LONG = 6 * 256


def measure(device: GpuDevice, folder: Path, numbers: tuple[int, ...]) -> dict[int, Any]:
    """By number of requests: ms of the worker and of the engine around it a step, and launches
    outside of graphs in a steady one."""
    engine = Engine(
        device,
        checkpoints.dummy(folder, "bf16"),
        compares_replays=False,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL"},
        max_num_batched_tokens=max(numbers) * 256,
        max_num_seqs=max(numbers),
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    )
    worker = _Timed(engine.worker)
    found = {}
    for number in numbers:
        for i in range(number):
            engine.ask(f"{number}-{i}", {"prompt_token_ids": [20 + i] * 128}, max_tokens=LONG)
        for _ in range(WARM):
            engine.step()
        worker.seconds, launches = 0.0, [len(device.launches)]
        begin = time.thread_time()
        for _ in range(TIMED):
            engine.step()
            launches.append(len(device.launches))
        whole = time.thread_time() - begin
        found[number] = {
            "worker": 1000 * worker.seconds / TIMED,
            "engine": 1000 * (whole - worker.seconds) / TIMED,
            "launches": median(after - before for before, after in pairwise(launches)),
        }
        engine.run(most=200)
    return found


class _Timed:
    """What a worker is called for in a step, by the clock of its thread."""

    def __init__(self, worker: Any) -> None:
        self.seconds = 0.0
        for name in ("execute_model", "sample_tokens"):
            setattr(worker, name, self._wrap(getattr(worker, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


HEADER = "| requests | worker, ours / stock (ms) | engine (ms) | launches | worker, ratio |"


def table(ours: dict[int, Any], stock: dict[int, Any]) -> list[str]:
    """A row for each number of requests."""

    def pair(number: int, name: str, digits: int) -> str:
        return f"{ours[number][name]:.{digits}f} / {stock[number][name]:.{digits}f}"

    return [
        HEADER,
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {number} | {pair(number, 'worker', 1)} | {pair(number, 'engine', 1)} "
            f"| {pair(number, 'launches', 0)} "
            f"| {ours[number]['worker'] / stock[number]['worker']:.2f} |"
            for number in ours
        ),
    ]
