"""The shipped checkpoints answer: pictures, a drafter's target, masked, grammars, quantised.

    python -m bench.lease.shipped

A process for each, all at once where there is a GPU. A line of JSON for each; the exit status says
whether all are right.
"""

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.harness import ROOT

CHECKPOINTS = ROOT / "checkpoints"
LEAST_RIGHT = 0.9
FORM = r"[a-z]{3,8}, [a-z]{3,8} and [a-z]{3,8}"


@dataclass(frozen=True)
class Case:
    checkpoint: str
    asks: str = "held_out.jsonl"
    options: dict[str, Any] = field(default_factory=dict)


DRAFTER = {
    "method": "dflash",
    "model": str(CHECKPOINTS / "qwen3-tiny-dflash"),
    "num_speculative_tokens": 15,
}
CASES = {
    "images": Case("diffusiongemma-tiny-vision", "held_out_images.jsonl"),
    "masked": Case("sdar-tiny"),
    "drafter": Case("qwen3-tiny-target", options={"speculative_config": DRAFTER}),
    "grammar": Case("diffusiongemma-tiny"),
    "NVFP4": Case("diffusiongemma-tiny-NVFP4"),
    "FP8": Case("diffusiongemma-tiny-FP8-dynamic"),
}


def ask(name: str, rows: int) -> dict[str, Any]:
    """In this process. The share of answers that are right, or of the form that was asked for."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    case, on_gpu = CASES[name], torch.cuda.is_available()
    lines = (CHECKPOINTS / case.asks).read_text().splitlines()
    asked = [json.loads(line) for line in lines[:: max(1, len(lines) // rows)]][:rows]
    options: dict[str, Any] = dict(max_model_len=1024, kv_cache_memory_bytes=1 << 30)
    options["max_num_seqs"] = 32
    if on_gpu:
        options |= dict(dtype="bfloat16", gpu_memory_utilization=0.05)
    else:
        options |= dict(enforce_eager=True)
    llm = LLM(str(CHECKPOINTS / case.checkpoint), **options | case.options)
    form = StructuredOutputsParams(regex=FORM) if name == "grammar" else None
    params = [
        SamplingParams(
            max_tokens=128,
            seed=seed,
            structured_outputs=form,
            temperature=0.0 if name == "drafter" else 1.0,
        )
        for seed in range(len(asked))
    ]
    outputs = llm.chat([row["messages"] for row in asked], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    if form is not None:
        right = [re.fullmatch(FORM, text) is not None for text in texts]
    else:
        right = [text == row["answer"] for text, row in zip(texts, asked, strict=True)]
    found = {"shipped": name, "right": sum(right) / len(right), "rows": len(right)}
    if not all(right):
        found["first wrong"] = texts[right.index(False)][:100]
    return found


def run(name: str, rows: int) -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, "-m", "bench.lease.shipped", "--case", name, "--rows", str(rows)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    found = [line for line in process.stdout.splitlines() if line.startswith('{"shipped"')]
    if process.returncode == 0 and found:  # vLLM's own lines may come behind it
        return json.loads(found[-1])
    log = (process.stdout + process.stderr).strip().splitlines()
    causes = [line for line in log if re.search(r"(Error|error):", line)]
    return {"shipped": name, "failed": [line[-300:] for line in (causes or log)[-3:]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(ask(args.case, args.rows)), flush=True)
        return
    all_right = True
    with ThreadPoolExecutor(len(CASES) if torch.cuda.is_available() else 1) as pool:
        for found in pool.map(lambda name: run(name, args.rows), CASES):
            all_right &= found.get("right", 0.0) >= LEAST_RIGHT
            print(json.dumps(found), flush=True)
    sys.exit(not all_right)


if __name__ == "__main__":
    main()
