"""Records 200 seeded answers in fp32, or compares today's with a record, to the bit.

    python scripts/answers.py record FILE.json     # before a change that must change nothing
    python scripts/answers.py compare FILE.json    # after it, on the same machine

Three engines on the shipped checkpoints: a diffusion model with synchronous scheduling, the same
with asynchronous scheduling, and an autoregressive target with its drafter. Rounding is the
machine's own, so a record says nothing about another machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENGINES = {"synchronous": 140, "asynchronous": 30, "drafter": 30}  # answers of each

# Parameters of requests, taken in turn. All have a seed and log-probabilities besides.
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 20},
    {"max_tokens": 100, "ignore_eos": True},
    {"temperature": 0.0},
    {"temperature": 1.6, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.02},
    {"presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"logit_bias": {20: 2.0, 31: -3.0}, "min_tokens": 12},
    {"bad_words_ids": True},
    {"prompt_logprobs": 2},
    {"extra_args": {"diffusion_max_steps": 3}},
    {"extra_args": {"diffusion_canvas_length": 24}},
    {"extra_args": {"diffusion_window_rule": "symmetric"}},
    {"extra_args": {"diffusion_acceptance": "confidence"}},
    {"extra_args": {"diffusion_acceptance": "top_k", "diffusion_judge_answer_only": 1}},
    {"extra_args": {"diffusion_t_min": 0.3, "diffusion_t_max": 1.2}},
    {"extra_args": {"diffusion_entropy_bound": 0.4, "diffusion_stability_threshold": 2}},
    {"pinned": True},
]
REFUSED_WITH_DRAFTS = ("pinned", "extra_args", "min_p", "logit_bias", "min_tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare", "answer"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help="answer: of this engine alone")
    options = parser.parse_args()
    if options.action == "answer":
        options.file.write_text(json.dumps(_run_engine(options.engine)))
        return 0
    answers = {engine: _run_engine_process(engine) for engine in ENGINES}
    if options.action == "record":
        options.file.write_text(json.dumps(answers))
        print(f"Recorded {sum(map(len, answers.values()))} answers in {options.file}.")
        return 0
    return _compare(json.loads(options.file.read_text()), answers)


def _compare(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> int:
    """Prints the answers that changed. Returns 1 if any did."""
    changed = 0
    for engine, answers in before.items():
        assert len(answers) == len(after[engine]) == ENGINES[engine]
        for i, (old, new) in enumerate(zip(answers, after[engine], strict=True)):
            if different := [key for key in old if old[key] != new[key]]:
                changed += 1
                print(f"{engine}, request {i}: {', '.join(different)} changed")
    print(f"{changed} of {sum(map(len, before.values()))} answers changed.")
    return int(changed > 0)


def _run_engine_process(engine: str) -> list[Any]:
    """Returns the answers of an engine that runs in a process of its own, with one thread: with
    several, sums would depend on what else the machine does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        command = [sys.executable, __file__, "answer", str(file), "--engine", engine]

        env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        subprocess.run(command, check=True, env=env, cwd=ROOT)
        return json.loads(file.read_text())


def _run_engine(engine: str) -> list[dict[str, Any]]:
    """Returns the answers of an engine in this process."""
    sys.path.insert(0, str(ROOT))
    from contextlib import nullcontext

    from tests.engines import asynchronous_scheduling, in_this_process

    schedule = asynchronous_scheduling if engine == "asynchronous" else nullcontext
    with in_this_process(), schedule():
        return _generate(engine)


def _generate(engine: str) -> list[dict[str, Any]]:
    """Returns the answers of an engine to `ENGINES[engine]` requests."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"model": "checkpoints/diffusiongemma-tiny"}
    if engine == "drafter":
        options = {
            "model": "checkpoints/qwen3-tiny-target",
            "speculative_config": {
                "method": "dflash",
                "model": "checkpoints/qwen3-tiny-dflash",
                "num_speculative_tokens": 15,
            },
            "additional_config": {"vllm_dllm": {"drafter": {"narrow_draft": True, "width": 11}}},
        }
    llm = LLM(
        **options,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=600,  # some canvases have to wait, some prompts are chunked
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
    )
    rows = [json.loads(r) for r in (ROOT / "checkpoints/held_out.jsonl").read_text().splitlines()]
    tokenizer = llm.get_tokenizer()
    prompts, parameters = [], []
    for i in range(ENGINES[engine]):
        text = tokenizer.apply_chat_template(
            rows[(7 * i) % len(rows)]["messages"], tokenize=False, add_generation_prompt=True
        )
        prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        parameters.append(SamplingParams(**_sampling_parameters(i, engine)))
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [_to_record(output) for output in outputs]


def _sampling_parameters(i: int, engine: str) -> dict[str, Any]:
    """Returns the parameters of request `i`."""
    own = dict(PARAMETERS[i % len(PARAMETERS)])
    if engine == "drafter":
        own = {key: value for key, value in own.items() if key not in REFUSED_WITH_DRAFTS}
    if own.pop("bad_words_ids", False):
        own["bad_words"] = ["7", "=5", "a b"]
    if own.pop("pinned", False):
        canvas = [(3 * j + i) % 200 + 8 for j in range(64)]
        own["extra_args"] = {"diffusion_seed_canvas": canvas, "diffusion_pinned": [0, 3, 9]}
    return {"max_tokens": 70, "seed": i, "logprobs": i % 4, **own}


def _to_record(output: Any) -> dict[str, Any]:
    """Returns what is compared of an output: tokens, log-probabilities to the bit, and the finish
    reason."""
    (answer,) = output.outputs
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [
            {str(token): found.logprob.hex() for token, found in each.items()}
            for each in answer.logprobs
        ],
        "prompt_logprobs": [
            None if each is None else {str(t): found.logprob.hex() for t, found in each.items()}
            for each in output.prompt_logprobs or []
        ],
        "finish_reason": answer.finish_reason,
    }


if __name__ == "__main__":
    sys.exit(main())
