"""How far a drafter gets on held-out prompts, task by task, and how often its target is right.

    python -m checkpoints.recipes.drafter.evaluate TARGET DRAFTER checkpoints/held_out.jsonl

Greedy speculative decoding worked out offline (`measurements.py`), in float32. The last line is
JSON.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from vllm_dllm.tools.drafter.measurements import Replayed, mean_length, replay
from vllm_dllm.tools.drafter.reference import load_drafter, load_target
from vllm_dllm.tools.drafter.sequences import complete, read_prompts, room_for_prompts


def summarize(
    tasks: Sequence[str], right: Sequence[bool], replayed: Sequence[Replayed], verify_width: int
) -> dict[str, dict[str, float]]:
    """Rows, exact match, answer tokens per row and τ, for each task and over all."""
    by_task: dict[str, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        by_task[task].append(i)
        by_task["all"].append(i)
    return {
        task: {
            "rows": len(rows),
            "exact_match": sum(right[i] for i in rows) / len(rows),
            "tokens": sum(len(replayed[i].answer) for i in rows) / len(rows),
            "tau": mean_length([replayed[i].emitted_lengths(verify_width) for i in rows]),
        }
        for task, rows in sorted(by_task.items(), key=lambda item: item[0] == "all")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take one row in this many")
    parser.add_argument(
        "--draft-widths",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[15],
        help="tokens drafted at once; τ is also given for fewer verified (default: 15)",
    )
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = load_target(args.target, args.device)
    drafter = load_drafter(args.drafter).to(args.device)
    room = room_for_prompts(target.config.max_position_embeddings, args.max_tokens)
    prompts = read_prompts(args.held_out, args.target, room)[:: args.every]
    rows = [json.loads(line) for line in args.held_out.read_text().splitlines()][:: args.every]
    start = time.monotonic()
    answers = complete(target, prompts, args.max_tokens)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
    print(f"{len(answers)} answers, {time.monotonic() - start:.0f} s", file=sys.stderr)
    tasks = [row["task"] for row in rows]
    widths: dict[str, float] = {}
    for draft_width in args.draft_widths:
        replayed = replay(target, drafter, prompts, answers, draft_width)
        if draft_width == args.draft_widths[0]:
            summary = summarize(tasks, right, replayed, draft_width)
        for verify_width in sorted({draft_width, *args.draft_widths}):
            if verify_width <= draft_width:
                lengths = [one.emitted_lengths(verify_width) for one in replayed]
                widths[f"{draft_width}/{verify_width}"] = mean_length(lengths)
    print(f"{'task':12} {'rows':>5} {'exact':>7} {'tokens':>7} {'τ':>6}")
    for task, line in summary.items():
        print(
            f"{task:12} {line['rows']:5} {line['exact_match']:7.1%} {line['tokens']:7.1f} "
            f"{line['tau']:6.2f}"
        )
    print("τ by drafted/verified:", ", ".join(f"{k} {tau:.2f}" for k, tau in widths.items()))
    print(
        json.dumps(
            {
                "summary": summary,
                "tau_by_drafted_and_verified": widths,
                "seconds": time.monotonic() - start,
            }
        )
    )


if __name__ == "__main__":
    main()
