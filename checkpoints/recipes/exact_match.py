"""Exact match of transformers' `generate` on held-out prompts, with its default sampler.

    python -m checkpoints.recipes.exact_match checkpoints/NAME checkpoints/held_out.jsonl

Prompts run in left-padded batches of similar length. The last line printed is JSON.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from PIL.Image import Image
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from checkpoints.recipes.images.patches import to_patches
from checkpoints.recipes.images.prompts import prompt_ids, read_images
from checkpoints.recipes.tokenizer import IMAGE_ID, PAD_ID


def read_rows(path: Path) -> list[dict]:
    """Rows {"messages", "answer", "task"} of a held-out file, some with "tools"."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate_inputs(prompts: list[list[int]], images: list[Image]) -> dict[str, torch.Tensor]:
    """What `generate` takes of prompts, padded on the left, and of all their images in order."""
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = [[int(i >= length - len(prompt)) for i in range(length)] for prompt in prompts]
    inputs = {"input_ids": ids, "attention_mask": torch.tensor(mask)}
    if images:
        values, places = to_patches(images)
        inputs |= {
            "mm_token_type_ids": (ids == IMAGE_ID).long(),
            "pixel_values": values,
            "image_position_ids": places,
        }
    return inputs


@torch.no_grad()
def answer_rows(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict],
    batch_size: int = 32,
) -> list[dict]:
    """Adds "output", "blocks" (canvases up to EOS) and "steps" (denoising steps) to each row.

    Messages may have pictures, as data URLs, of the sizes that the small model that sees takes.
    """
    images = [read_images(row["messages"]) for row in rows]
    prompts = [
        prompt_ids(tokenizer, row["messages"], seen, row.get("tools"))
        for row, seen in zip(rows, images, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
    canvas_length = model.config.canvas_length
    answered: list[dict] = [{} for _ in rows]
    for start in range(0, len(order), batch_size):
        print(f"{start} of {len(order)} prompts", file=sys.stderr, flush=True)
        chosen = order[start : start + batch_size]
        inputs = generate_inputs(
            [prompts[i] for i in chosen], [image for i in chosen for image in images[i]]
        )
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        result = model.generate(**inputs)
        new_tokens = result.sequences[:, inputs["input_ids"].shape[1] :]
        num_tokens = (new_tokens != tokenizer.pad_token_id).sum(-1)
        # generate reports tokens per forward for each row, without pads
        steps = (num_tokens / result.tokens_per_forward).round().int().tolist()
        # The tokens of calls are special ones, too.
        texts = [
            text.partition(tokenizer.eos_token)[0] for text in tokenizer.batch_decode(new_tokens)
        ]
        for i, text, tokens, row_steps in zip(
            chosen, texts, num_tokens.tolist(), steps, strict=True
        ):
            answered[i] = {
                **rows[i],
                "output": text,
                "blocks": max(1, -(-tokens // canvas_length)),
                "steps": row_steps,
            }
    return answered


def summarize(answered: list[dict]) -> dict:
    """Exact match and steps per block, for each task and over all rows."""
    by_task = defaultdict(list)
    for row in answered:
        by_task[row["task"]].append(row)
        by_task["all"].append(row)
    return {
        task: {
            "rows": len(rows),
            "exact_match": sum(row["output"] == row["answer"] for row in rows) / len(rows),
            "steps_per_block": sum(row["steps"] for row in rows)
            / sum(row["blocks"] for row in rows),
        }
        for task, rows in by_task.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--every", type=int, default=1, help="take one row in this many")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show-wrong", type=int, default=0, help="print this many wrong answers")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(args.checkpoint, dtype=args.dtype)
    model.to(args.device).eval()
    rows = read_rows(args.held_out)[:: args.every]
    start = time.monotonic()
    answered = answer_rows(model, tokenizer, rows, args.batch_size)
    seconds = time.monotonic() - start
    wrong = [row for row in answered if row["output"] != row["answer"]]
    for row in wrong[: args.show_wrong]:
        content = row["messages"][-1]["content"]
        prompt = content if isinstance(content, str) else content[-1]["text"]
        print(
            f"{row['task']}: {prompt[-80:]!r}\n  want {row['answer']!r}\n  got  {row['output']!r}"
        )
    summary = summarize(answered)
    print(f"{'task':12} {'rows':>5} {'exact':>7} {'steps/block':>12}")
    for task, line in summary.items():
        print(
            f"{task:12} {line['rows']:5} {line['exact_match']:7.1%} {line['steps_per_block']:12.1f}"
        )
    print(json.dumps({"summary": summary, "seconds": seconds, "dtype": args.dtype}))


if __name__ == "__main__":
    main()
