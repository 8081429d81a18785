"""The subject: this project's engine, in vLLM's default process layout."""

import argparse
from typing import Any

from bench import system
from bench.engine import CanvasEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--canvas-length", type=int, required=True)
    args = parser.parse_args()

    def start() -> tuple[dict[str, Any], Any]:
        engine = CanvasEngine(args.checkpoint, args.canvas_length)
        return {"system": "vllm-dllm"}, engine.handlers()

    system.serve(start)


if __name__ == "__main__":
    main()
