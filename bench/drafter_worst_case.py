"""The cost of a drafter that is never right. Target and drafter have made-up weights, 41 and 8
million, so that a step takes some ms, closer to real models than with the shipped ones.

    python -m bench.drafter_worst_case

Unless the answers are the same with and without it, nothing is reported. The last line is JSON,
which also lands in bench/results/<machine>/.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from bench import harness
from bench.drafter import (
    CONTEXT,
    CONTEXT_TOKENS,
    ENGINE,
    FOREIGN,
    FOREIGN_TOKENS,
    documents,
    measure,
)
from bench.drafter_report import ALONE, FIXED, Results, bars, print_results
from bench.system import taking_turns
from checkpoints.recipes.drafter.tiny import make_tiny_drafter, randomize_weights
from checkpoints.recipes.target_model import save_target, target_config
from checkpoints.recipes.tokenizer import build_tokenizer

PROMPTS = {1: 16, 4: 32, 16: 64}  # by concurrency
ACCEPTANCE = "acceptance"


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Target and drafter, with the ratio of layers that published drafters have."""
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(
        target_config(
            len(tokenizer),
            hidden_size=512,
            intermediate_size=1536,
            num_layers=16,
            max_position_embeddings=2048,
        )
    )
    randomize_weights(model, seed=0)
    save_target(model, tokenizer, folder / "target", torch.float32)
    drafter = make_tiny_drafter(
        folder / "drafter",
        folder / "target",
        num_layers=3,
        target_layer_ids=(1, 7, 13),
        block_size=16,
    )
    return folder / "target", drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(PROMPTS))
    args = parser.parse_args()
    machine = harness.machine()
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = make_pair(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(target)
        workloads = {
            FOREIGN: documents(tokenizer, FOREIGN_TOKENS, count=64),
            CONTEXT: documents(tokenizer, CONTEXT_TOKENS, count=16),
        }
        alone = {"target": str(target)}
        drafts = alone | {"drafter": str(drafter), "num_drafts": 15}
        commands: dict[str, tuple[str, dict[str, Any]]] = {
            ALONE: (ENGINE, alone),
            FIXED: (ENGINE, drafts),
            ACCEPTANCE: (ENGINE, drafts | {"settings": {"width_policy": ACCEPTANCE}}),
        }
        results: Results = {kind: {name: {} for name in commands} for kind in workloads}
        with taking_turns(commands) as (_, call):
            for concurrency in args.concurrency:
                for kind, given in workloads.items():
                    num_prompts = PROMPTS.get(concurrency, 2 * concurrency)
                    found, _ = measure(
                        call, list(commands), given, num_prompts, concurrency, args.rounds
                    )
                    for name, line in found.items():
                        results[kind][name][str(concurrency)] = line
                    print(f"{kind}, {concurrency} at once: measured", flush=True)
    print_results(results)
    met = bars({kind: {n: by[n] for n in (ALONE, ACCEPTANCE)} for kind, by in results.items()})
    harness.print_bars(met)
    report = {
        "bench": "drafter_worst_case",
        "machine": machine,
        "dtype": "float32",
        "prompts": {str(c): PROMPTS.get(c, 2 * c) for c in args.concurrency},
        "results": results,
        "bars": met,
    }
    harness.publish(report, harness.results_folder() / "drafter_worst_case.json")


if __name__ == "__main__":
    main()
