"""How many forwards Nemotron-Labs-Diffusion's three modes take for a token, and what they write.

    python -m bench.modes

No published weights are here. So a small model of their layout is trained first, some minutes, on a
language that can be judged: words of three to nine tokens, each with four words that may follow it.
Inside a word all is certain, behind it little, as in text. As the published ones, it is trained to
foretell the next token causally, and to fill in a block that begins with a known one. Then prompts
are answered one at a time, in each mode, greedily and at temperature 1: tokens of a forward, tokens
of a draft that stand, and how many tokens break a word. Refuses to report if the other two modes'
greedy answers differ.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from vllm import LLM, SamplingParams

from bench import harness
from tests.engine.masked import make_checkpoint, published_weights

ARCHITECTURE = "NemotronLabsDiffusionModel"
BLOCK, LENGTH, BATCH = 32, 96, 24
TOKENS = range(10, 90)
SHARES = (0.6, 0.2, 0.15, 0.05)
"""Of the words that may follow a word."""
MODES = ("diffusion", "autoregressive", "self_speculation")
Language = tuple[list[list[int]], list[list[int]]]  # words, and the words that may follow each


def make_language(rng: random.Random, num_words: int = 16) -> Language:
    words = [rng.choices(TOKENS, k=rng.randint(3, 9)) for _ in range(num_words)]
    return words, [rng.sample(range(num_words), len(SHARES)) for _ in words]


def write(language: Language, length: int, rng: random.Random) -> list[int]:
    words, follow = language
    word = rng.randrange(len(words))
    tokens: list[int] = []
    while len(tokens) < length + 9:
        tokens += words[word]
        word = rng.choices(follow[word], SHARES)[0]
    first = rng.randrange(9)
    return tokens[first : first + length]


def breaks(language: Language, tokens: list[int]) -> int:
    """Tokens that nothing explains: no word goes on with them, and none that may follow begins."""
    words, follow = language
    anywhere = {(w, i) for w, word in enumerate(words) for i in range(len(word))}
    places, found = anywhere, 0
    for token in tokens:
        fitting = {(w, i) for w, i in places if words[w][i] == token}
        if not fitting:
            found, fitting = found + 1, {(w, i) for w, i in anywhere if words[w][i] == token}
        places = {
            place
            for w, i in fitting
            for place in ([(w, i + 1)] if i + 1 < len(words[w]) else [(n, 0) for n in follow[w]])
        }
    return found


def train(model: torch.nn.Module, mask_id: int, language: Language, num_steps: int) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, num_steps, pct_start=0.05)
    for step in range(num_steps):
        clean = torch.tensor([write(language, LENGTH, rng) for _ in range(BATCH)])
        start = rng.randint(2, LENGTH - BLOCK)
        block = clean[:, start : start + BLOCK].clone()
        share = torch.tensor([rng.choice((1.0, rng.random())) for _ in range(BATCH)])
        hidden = torch.rand(BATCH, BLOCK) < share[:, None]
        hidden[:, 0] = False
        target = torch.where(hidden, block, -100)
        known = torch.cat((clean[:, :start], block.masked_fill(hidden, mask_id)), dim=1)
        logits = logits_of(model, known, start)
        loss = F.cross_entropy(logits[:, :start].flatten(0, 1), clean[:, 1 : start + 1].flatten())
        drafted = F.cross_entropy(logits[:, start:].flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        (loss + drafted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step}: {loss.item():.3f} causal, {drafted.item():.3f} filled", flush=True)


def logits_of(model: torch.nn.Module, tokens: torch.Tensor, num_causal: int) -> torch.Tensor:
    """[batch, T, V] of tokens [batch, T]: the first ones are causal, the others see all."""
    position = torch.arange(tokens.shape[1])
    seen = (position[:, None] >= position) | (position[:, None] >= num_causal)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    return model(input_ids=tokens, attention_mask=mask.expand(len(tokens), -1, -1, -1)).logits


def count_forwards(llm: LLM) -> list[int]:
    """Grows with every forward, by its tokens."""
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
    mode: str,
    temperature: float,
) -> tuple[dict[str, float], list[list[int]]]:
    forwards.clear()
    answers, length = [], 128
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=length,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
            extra_args={"diffusion_mode": mode},
        )
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    num_tokens = length * len(prompts)
    beside = len(forwards) - len(prompts)  # those of prompts
    broken = sum(
        breaks(language, prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)
    )
    found = {
        "tokens_per_forward": num_tokens / len(forwards),
        "broken_per_1000_tokens": 1000 * broken / num_tokens,
    }
    if mode == "self_speculation":
        found["tokens_per_draft"] = num_tokens / (beside / 2)
    return found, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--prompts", type=int, default=40)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of steps so small the threads would wait for each other
    rng = random.Random(1)
    language = make_language(rng)
    path, plain = make_checkpoint(Path(tempfile.mkdtemp()), BLOCK, ARCHITECTURE)
    train(plain.model.train(), plain.mask_id, language, args.steps)
    weights = published_weights(plain.model, ARCHITECTURE)
    save_file(weights, path / "model.safetensors", {"format": "pt"})

    prompts = [write(language, rng.randint(12, 40), rng) for _ in range(args.prompts)]
    llm = LLM(
        str(path),
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    forwards = count_forwards(llm)
    report: dict[str, Any] = {"machine": harness.machine(), "prompts": len(prompts), "results": {}}
    for temperature in (0.0, 1.0):
        results, answers = {}, {}
        for mode in MODES:
            results[mode], answers[mode] = measure(
                llm, forwards, language, prompts, mode, temperature
            )
            print(f"temperature {temperature:g}, {mode}: {results[mode]}", flush=True)
        same = sum(map(list.__eq__, answers["autoregressive"], answers["self_speculation"]))
        if temperature == 0.0 and same < len(prompts):
            raise harness.Refused(f"{len(prompts) - same} greedy answers differ between modes.")
        report["results"][f"{temperature:g}"] = results | {"same_answers": same}
    harness.publish(report, harness.results_folder() / "modes.json")


if __name__ == "__main__":
    main()
