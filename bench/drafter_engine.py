"""A measured system of `bench.drafter`: a target alone, or with a drafter, stock vLLM's or ours.

Stock vLLM drafts on the CPU as its DiffusionGemma does (`stock_vllm.py`): a plugin lends it our
native versions of the runner's kernels and nothing else.
"""

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench import stock_vllm, system
from bench.engine import Engine
from bench.step_split import DRAFT, DRAFT_LOGITS, LAYERS, MODEL_PARTS

MAX_NUM_SEQS = 16


class DraftEngine(Engine):
    counters = "vllm:spec_decode_num_"

    def split(
        self, prompts: list[list[int]], max_tokens: int, batch: int = 1
    ) -> list[dict[str, float]]:
        """The parts of every step, in ms; they add up to the step."""
        self.llm.collective_rpc("start_split")
        self.run(prompts, batch=batch, max_tokens=max_tokens, temperature=0.0)
        return [parts(step) for step in self.llm.collective_rpc("stop_split")[0]]


def parts(step: dict[str, float]) -> dict[str, float]:
    verify = step[LAYERS] + step.get(MODEL_PARTS["embed_input_ids"], 0.0)
    draft_logits = step.get(DRAFT_LOGITS, 0.0)
    found = {
        "draft_ms": step.get(DRAFT, 0.0) - draft_logits,
        "verify_ms": verify,
        "lm_heads_ms": step.get(MODEL_PARTS["compute_logits"], 0.0) + draft_logits,
    }
    return {**found, "host_ms": step["step"] - sum(found.values()), "step_ms": step["step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--name", required=True, help="the system's name in the report")
    parser.add_argument("--drafter", help="folder; without one, the target alone")
    parser.add_argument("--num-drafts", type=int)
    parser.add_argument("--settings", type=json.loads, default={}, help="ours, in JSON")
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args()
    options: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 2048}
    if args.drafter is None:
        # The faster of the two runners is what a drafter has to beat.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    else:
        options["speculative_config"] = {
            "method": "dflash",
            "model": args.drafter,
            "num_speculative_tokens": args.num_drafts,
        }
    if args.settings:
        options["additional_config"] = {"vllm_dllm": {"drafter": args.settings}}

    def start() -> tuple[dict[str, Any], Any]:
        engine = DraftEngine(args.target, **options)
        return {"system": args.name, "settings": args.settings}, engine.handlers()

    with tempfile.TemporaryDirectory() if args.stock else nullcontext() as folder:
        if folder is not None:
            stock_vllm.set_environment(Path(folder))
        system.serve(start)


if __name__ == "__main__":
    main()
