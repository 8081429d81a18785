"""A small masked model in this project's engine, with some settings of the extension."""

import argparse
import json
from typing import Any

from bench import system
from bench.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--extension", type=json.loads, default={})
    args = parser.parse_args()

    def start() -> tuple[dict[str, Any], Any]:
        settings = {"vllm_dllm": args.extension}
        engine = Engine(args.checkpoint, enforce_eager=True, additional_config=settings)
        return args.extension, engine.handlers()

    system.serve(start)


if __name__ == "__main__":
    main()
