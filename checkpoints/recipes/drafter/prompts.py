"""Prompts of the tasks for a drafter of qwen3-tiny-target, none of them held out:

python -m checkpoints.recipes.drafter.prompts --count 6000 > prompts.jsonl
"""

import argparse
import json
import random

from checkpoints.recipes.tasks import TASKS, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.count):
        example = generate(rng, rng.choice(list(TASKS)), held_out=False)
        print(json.dumps({"task": example.task, "messages": example.messages()}))


if __name__ == "__main__":
    main()
