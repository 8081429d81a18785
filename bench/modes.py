"""What masked models gain and lose with the settings that their authors recommend.

    python -m bench.modes

No published weights are here. So a small model of each family's layout is trained first, some
minutes each, on a language that can be judged (`bench.made_up_language`). Then prompts are answered
one at a time, greedily and at temperature 1, with the checkpoint's own settings, with the presets
that `vllm-dllm tune` tries first, and in all modes of Nemotron: tokens of a forward, tokens a
second, and tokens that break a word. Refuses to report if Nemotron's autoregressive and verified
answers differ at temperature 0.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from optuna.trial import FixedTrial
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from bench import harness
from bench.made_up_language import Language, count_breaks, make_language, trained_checkpoint, write
from vllm_dllm.tools.tune.space import Space

NEMOTRON = "NemotronLabsDiffusionModel"
ARCHITECTURES = (
    "SDARForCausalLM",
    "LLaDA2MoeModelLM",
    NEMOTRON,
    "Fast_dLLM_QwenForCausalLM",
)
ANSWER = 128  # tokens
MODES: list[dict[str, str | int | float]] = [
    {"diffusion_mode": "autoregressive"},
    {"diffusion_mode": "self_speculation"},
]


def settings_of(path: Path, architecture: str) -> list[dict[str, Any]]:
    """The extension's settings to compare, the checkpoint's own first."""
    space = Space(path)
    keys = [space.suggest(FixedTrial(preset)) for preset in space.presets()]
    if architecture == NEMOTRON:
        keys[1:] = MODES
    return [space.settings_for(each) for each in keys]


def start(path: Path, extension: Mapping[str, Any]) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        additional_config={"vllm_dllm": extension},
    )


def count_forwards(llm: LLM) -> list[int]:
    """Returns a list that grows with every forward, by its tokens."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    forwards: list[int] = []
    execute = executor.execute_model

    def counted(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens:
            forwards.append(output.total_num_scheduled_tokens)
        return execute(output, *args, **kwargs)

    executor.execute_model = counted
    return forwards


def measure(
    llm: LLM,
    forwards: list[int],  # see `count_forwards`
    language: Language,
    prompts: list[list[int]],
    temperature: float,
) -> tuple[dict[str, float], list[list[int]]]:
    forwards.clear()
    answers, began = [], time.perf_counter()
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=ANSWER, temperature=temperature, seed=seed, ignore_eos=True
        )
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    seconds = time.perf_counter() - began
    num_tokens = ANSWER * len(prompts)
    broken = [
        count_breaks(language, prompt + answer) - count_breaks(language, prompt)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    found = {
        "tokens_per_forward": num_tokens / len(forwards),
        "tokens_per_second": num_tokens / seconds,
        "broken_per_1000_tokens": 1000 * sum(broken) / num_tokens,
    }
    return found, answers


def measure_family(
    path: Path, architecture: str, language: Language, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    found = []
    greedy: dict[str, list[list[int]]] = {}
    for extension in settings_of(path, architecture):
        llm = start(path, extension)
        forwards = count_forwards(llm)
        measure(llm, forwards, language, prompts[:2], 0.0)  # warms up
        row: dict[str, Any] = {"settings": extension}
        for temperature in (0.0, 1.0):
            numbers, answers = measure(llm, forwards, language, prompts, temperature)
            row[f"temperature {temperature:g}"] = numbers
            print(architecture, json.dumps(extension), temperature, numbers, flush=True)
            if temperature == 0.0:
                greedy[extension["defaults"].get("diffusion_mode", "")] = answers
        found.append(row)
        del llm
        cleanup_dist_env_and_memory()
    if architecture == NEMOTRON and greedy["autoregressive"] != greedy["self_speculation"]:
        raise harness.Refused("Greedy answers of Nemotron's verified drafts are others.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--families", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument(
        "--folder", type=Path, help="keeps the trained models; those that it has are not trained"
    )
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of steps so small the threads would wait for each other
    rng = random.Random(1)
    language = make_language(rng)
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [write(language, rng.randint(12, 40), rng) for _ in range(args.prompts)]
    results = {}
    for architecture in args.families:
        path = trained_checkpoint(folder, architecture, language, args.steps)
        results[architecture] = measure_family(path, architecture, language, prompts)
    report = {"machine": harness.machine(), "prompts": len(prompts), "results": results}
    harness.publish(report, harness.results_folder() / "modes.json")


if __name__ == "__main__":
    main()
