"""What masked models gain and lose with the settings that their authors recommend.

    python -m bench.modes

No published weights are here. So a small model of each family's layout is trained first, some
minutes each, on a language that can be judged (`bench.made_up_language`). Then prompts are answered
one at a time, greedily and at temperature 1, with the checkpoint's own settings, with the presets
that `vllm-dllm tune` tries first, and in all modes of Nemotron: tokens of a forward, tokens a
second, and tokens that break a word. Each setting has an engine of its own, and they take turns, so
that tokens a second can be compared. Refuses to report if Nemotron's autoregressive and verified
answers differ at temperature 0.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from optuna.trial import FixedTrial

from bench import harness
from bench.made_up_language import Language, count_breaks, make_language, trained_checkpoint, write
from bench.system import taking_turns
from vllm_dllm.tools.tune.search import Space

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


def measure_family(
    path: Path, architecture: str, language: Language, prompts: list[list[int]], rounds: int
) -> list[dict[str, Any]]:
    """Returns for each setting the medians of its rounds by temperature, and how many times the
    tokens a second of the first one in the same round it has: the least, the median, the most."""
    settings = {json.dumps(each): each for each in settings_of(path, architecture)}
    common = {"checkpoint": str(path), "enforce_eager": True}
    commands = {
        name: ("bench.engine:Engine", common | {"additional_config": {"vllm_dllm": own}})
        for name, own in settings.items()
    }
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in settings}
    greedy: dict[str, list[list[int]]] = {}
    with taking_turns(commands) as (_, call):
        for turn in range(rounds + 1):  # the first one warms up
            for name, own in found.items():
                for temperature in (0.0, 1.0):
                    run = call(
                        name,
                        "run",
                        prompts=prompts if turn else prompts[:2],
                        batch=1,
                        max_tokens=ANSWER,
                        temperature=temperature,
                        seed=0,
                        ignore_eos=True,
                    )
                    if turn:
                        numbers = count(language, prompts, run)
                        print(architecture, name, temperature, numbers, flush=True)
                        own.setdefault(f"temperature {temperature:g}", []).append(numbers)
                    if turn and temperature == 0.0:
                        mode = settings[name]["defaults"].get("diffusion_mode", "")
                        greedy[mode] = run["outputs"]
    if architecture == NEMOTRON and greedy["autoregressive"] != greedy["self_speculation"]:
        raise harness.Refused("Greedy answers of Nemotron's verified drafts are others.")
    first = next(iter(found.values()))
    return [
        {"settings": settings[name]}
        | {key: summary(numbers, first[key]) for key, numbers in own.items()}
        for name, own in found.items()
    ]


def count(language: Language, prompts: list[list[int]], run: dict[str, Any]) -> dict[str, float]:
    """`run`: what the engine's handler returned for the prompts."""
    num_tokens = ANSWER * len(prompts)
    broken = [
        count_breaks(language, prompt + answer) - count_breaks(language, prompt)
        for prompt, answer in zip(prompts, run["outputs"], strict=True)
    ]
    return {
        "tokens_per_forward": num_tokens / run["forwards"],
        "tokens_per_second": num_tokens / run["seconds"],
        "broken_per_1000_tokens": 1000 * sum(broken) / num_tokens,
    }


def summary(rounds: list[dict[str, float]], first: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the medians of a setting's rounds. `first`: the rounds of the first setting."""
    times = [
        own["tokens_per_second"] / other["tokens_per_second"]
        for own, other in zip(rounds, first, strict=True)
    ]
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return medians | {"times_the_first": [min(times), statistics.median(times), max(times)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument(
        "--folder", type=Path, help="keeps the trained models; those that it has are not trained"
    )
    args = parser.parse_args()
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
        results[architecture] = measure_family(path, architecture, language, prompts, args.rounds)
    report = {"machine": harness.machine(), "prompts": len(prompts), "results": results}
    harness.publish(report, harness.results_folder() / "modes.json")


if __name__ == "__main__":
    main()
