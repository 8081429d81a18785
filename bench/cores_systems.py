"""The systems of `bench.cores`: this project's engine on some cores, and transformers on all."""

import argparse
import os
import statistics
from typing import Any

from bench import system
from bench.engine import CanvasEngine

OURS, TRANSFORMERS = "vllm-dllm", "transformers"
MAX_REQUESTS = 32


class CoresEngine(CanvasEngine):
    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds the median step, timed in the worker from the start of one to that of the next."""
        ask = self.llm.collective_rpc
        first = ask("num_forwards")[0]
        found = super().run(*args, **kwargs)
        return {**found, "ms_per_step": statistics.median(ask("steps_ms", args=(first,))[0])}


def start_engine(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    if args.reserved is not None:
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = args.reserved
    engine = CoresEngine(
        args.checkpoint,
        args.canvas_length,
        dtype=args.dtype,
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=MAX_REQUESTS * args.canvas_length + 2048,
        worker_extension_cls="bench.full_shape_engine.WorkerProbe",
    )
    return {"system": OURS, "reserved": args.reserved}, engine.handlers()


def start_transformers(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    from bench.transformers_generate import Reference

    cores = len(os.sched_getaffinity(0))
    reference = Reference(args.checkpoint, args.canvas_length, cores, dtype=args.dtype)
    return {"system": TRANSFORMERS, "threads": cores}, reference.handlers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--canvas-length", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--system", choices=[OURS, TRANSFORMERS], default=OURS)
    parser.add_argument("--reserved", help="VLLM_CPU_NUM_OF_RESERVED_CPU of our engine")
    args = parser.parse_args()
    start = start_engine if args.system == OURS else start_transformers
    system.serve(lambda: start(args))


if __name__ == "__main__":
    main()
