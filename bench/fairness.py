"""What a client waits for short answers while another asks for something dear.

    python -m bench.fairness

A victim asks for 20 tokens, again and again, alone and beside one attacker at a time. Refused
attacks count too: their defence is the limit (`docs/serving.md`). See bench/README.md.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import harness
from bench.clients import Answered, asking, serving

Body = dict[str, Any]
LONG_ANSWER: Body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
BIASES = {str(token): 0.1 for token in range(512)}
PENALTIES: Body = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}
WORDS = [f"{a} {b} and more of it" for a in "abcdefgh" for b in "klmnopqr"]
ATTACKS: dict[str, Body] = {
    "an ordinary neighbour": LONG_ANSWER,
    "20 prompts of 1,000 tokens, prompt_logprobs 20": {
        "prompt": [[7 + i] * 1000 for i in range(20)],
        "max_tokens": 1,
        "prompt_logprobs": 20,
    },
    "a prompt of 97 tokens, prompt_logprobs 20": {
        "prompt": [7] * 97,
        "max_tokens": 1,
        "prompt_logprobs": 20,
    },
    "20 prompts of 1,000 tokens": {"prompt": [[7 + i] * 1000 for i in range(20)], "max_tokens": 1},
    "n = 128": LONG_ANSWER | {"n": 128},
    "n = 64": LONG_ANSWER | {"n": 64},
    "64 long bad words": LONG_ANSWER | {"bad_words": WORDS},
    "512 biases, penalties, log-probabilities": LONG_ANSWER
    | PENALTIES
    | {"logit_bias": BIASES, "logprobs": 20},
    "canvases of 1": LONG_ANSWER | {"vllm_xargs": {"diffusion_canvas_length": 1}},
    "canvases of 8": LONG_ANSWER | {"vllm_xargs": {"diffusion_canvas_length": 8}},
}


def victim(number: int) -> Body:
    return {"prompt": [11, 12, 13 + number % 100], "max_tokens": 20, "seed": number}


def attacker(attack: Body) -> Callable[[int], Body]:
    return lambda number: attack | {"seed": number}


def waits(answers: list[Answered], since: float) -> dict[str, float]:
    """Of those that came after `since`."""
    found = [1000 * a.seconds for a in answers if a.at >= since and a.status == 200]
    if not found:
        raise harness.Refused("the victim got no answer.")
    return {"p50_ms": statistics.median(found), "max_ms": max(found), "answers": len(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/diffusiongemma-tiny"))
    parser.add_argument("--seconds", type=float, default=20, help="for each attack")
    parser.add_argument("--only", help="attacks whose name holds this")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine, results = harness.machine(), {}

    def measure(port: int, attack: Body | None) -> dict[str, Any]:
        bodies = [victim] if attack is None else [victim, attacker(attack)]
        with asking(port, args.checkpoint, bodies) as answers:
            time.sleep(args.seconds / 4)  # until the attack is under way
            since = time.monotonic()
            time.sleep(args.seconds)
        attacked = Counter(a.status for a in answers[-1]) if attack is not None else Counter()
        return waits(answers[0], since) | {"attacker": {str(k): v for k, v in attacked.items()}}

    with serving(args.checkpoint) as server:
        measure(server.port, None)  # warms up
        alone = measure(server.port, None)
        print(f"alone: {alone['p50_ms']:.0f} ms, at most {alone['max_ms']:.0f}", flush=True)
        for name, attack in ATTACKS.items():
            if args.only and args.only not in name:
                continue
            found = results[name] = measure(server.port, attack)
            found["times"] = found["p50_ms"] / alone["p50_ms"]
            print(
                f"{name}: {found['p50_ms']:.0f} ms ({found['times']:.1f} times), at most "
                f"{found['max_ms']:.0f}; attacker {found['attacker']}",
                flush=True,
            )
    report = {"bench": "fairness", "machine": machine, "alone": alone, "attacks": results}
    harness.publish(report, args.out / "fairness.json")


if __name__ == "__main__":
    main()
