"""Trains the small autoregressive target: python -m vllm_dllm.drafters.training.target --out DIR

A Qwen3 of eight layers learns the next token of the answers to the tasks of `checkpoint/tasks.py`,
with the tokenizer and chat template of diffusiongemma-tiny. Long look-ups come in only once dense
short ones have had time to be learnt: a document of 96 pairs alone teaches a small model nothing.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_dllm.checkpoint.muon import MuonAdamW
from vllm_dllm.checkpoint.tasks import TRAINING_TASKS, Example, generate
from vllm_dllm.checkpoint.tokenizer import BOS_ID, EOS_ID, PAD_ID, build_tokenizer
from vllm_dllm.drafters.training.target_heads import install_look_up

POOL_SIZE = 384  # examples sorted by length together
FIRST_SHARES = {
    "add": 0.5,
    "sort": 1.5,
    "reverse": 0.7,
    "count_up": 0.7,
    "lookup_short": 1.0,
    "lookup_dense": 3.0,
    "write_json": 0.5,
    "chat": 0.5,
}
LAST_SHARES = {
    "add": 0.7,
    "sort": 1.5,
    "reverse": 0.5,
    "count_up": 0.7,
    "lookup_short": 0.5,
    "lookup_dense": 0.5,
    "lookup": 3.0,
    "write_json": 0.7,
    "chat": 0.7,
}
LOG_FILE = "training_log.json"
FIRST_PART = 0.3  # of the time, with FIRST_SHARES


@dataclass
class Batch:
    """B rows of prompt and answer, right-padded: causal attention needs no mask then."""

    tasks: list[str]  # of each row
    tokens: Tensor  # [B, T] int64
    weight: Tensor  # [B, T - 1] float32, loss weight of tokens[:, 1:]; 0 outside of the answer


def target_config(vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def encode_example(
    tokenizer: PreTrainedTokenizerFast, example: Example
) -> tuple[list[int], list[int]]:
    """(prompt, answer) as token ids; the answer ends with EOS."""
    text = tokenizer.apply_chat_template(
        example.messages(), tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return prompt, [*tokenizer.encode(example.answer, add_special_tokens=False), EOS_ID]


def _collate(rows: list[tuple[str, list[int], list[int]]]) -> Batch:
    length = max(len(prompt) + len(answer) for _, prompt, answer in rows)
    tokens = torch.full((len(rows), length), PAD_ID)
    weight = torch.zeros(len(rows), length - 1)
    for row, (_, prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        # Per-token weight falls with length, or long answers would be all of the loss.
        weight[row, len(prompt) - 1 : end - 1] = len(answer) ** -0.5
    return Batch([task for task, _, _ in rows], tokens, weight)


def training_batches(
    tokenizer: PreTrainedTokenizerFast,
    task_shares: Callable[[], dict[str, float]],
    *,
    seed: int,
    tokens_per_batch: int,
) -> Iterator[Batch]:
    """Endless batches of rows of like length; `task_shares` is asked before every pool of rows."""
    rng = random.Random(seed)
    while True:
        shares = task_shares()
        pool = []
        for task in rng.choices(list(shares), list(shares.values()), k=POOL_SIZE):
            example = generate(rng, task, held_out=False)
            pool.append((task, *encode_example(tokenizer, example)))
        # Noise on the sort key mixes the tasks whose rows are equally long.
        pool.sort(key=lambda row: len(row[1]) + len(row[2]) + rng.uniform(0, 24))
        batches: list[Batch] = []
        rows: list[tuple[str, list[int], list[int]]] = []
        longest = 0
        for row in pool:
            longest = max(longest, len(row[1]) + len(row[2]))
            if rows and (len(rows) + 1) * longest > tokens_per_batch:
                batches.append(_collate(rows))
                rows, longest = [], len(row[1]) + len(row[2])
            rows.append(row)
        batches.append(_collate(rows))
        rng.shuffle(batches)
        yield from batches


def next_token_loss(model: Qwen3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy, and the weighted share of right best guesses of each row [B]."""
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits
    target = batch.tokens[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    loss = (loss * batch.weight.flatten()).sum() / batch.weight.sum()
    right = (logits.detach().argmax(-1) == target) * batch.weight
    return loss, right.sum(-1) / batch.weight.sum(-1)


def learning_rate_scale(progress: float, warmup: float = 0.01) -> float:
    """Linear warm-up, constant, then linear to zero: `progress` runs from 0 to 1."""
    return min(progress / warmup, 1.0) * min(1.0, (1.0 - progress) / 0.5)


@torch.no_grad()
def initialize(model: Qwen3ForCausalLM) -> None:
    """Fan-in scaled normal matrices, those that write to the residual stream a quarter of that, so
    that tokens stay visible in it; then the heads of a look-up. Norms stay one."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.1 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std /= 4
            parameter.normal_(0.0, std)
    install_look_up(model)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes a bf16 copy with tokenizer; `model` keeps training in fp32."""
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    copy.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # save_pretrained lets nobody else read
    tokenizer.save_pretrained(out)


def earlier_log(checkpoint: Path | None) -> list[dict]:
    """The log of the run that made `checkpoint`; steps and tokens count on, minutes do not."""
    return json.loads((checkpoint / LOG_FILE).read_text()) if checkpoint else []


def save_loss_curve(log: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    steps = [entry["step"] for entry in log]
    left.plot(steps, [entry["loss"] for entry in log])
    left.set(xlabel="step", ylabel="weighted cross entropy (nats)", yscale="log")
    for task in TRAINING_TASKS:
        points = [(e["step"], 1 - e["right"][task]) for e in log if task in e["right"]]
        right.plot(*zip(*points, strict=True), label=task)
    right.set(xlabel="step", ylabel="wrong tokens", yscale="symlog", ylim=(0, 1))
    right.set_yscale("symlog", linthresh=1e-3)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(target_config(len(tokenizer)))
    if args.init_from:
        model = Qwen3ForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
    else:
        initialize(model)
    optimizer = MuonAdamW(
        model, muon_lr=args.muon_lr, adam_lr=args.adam_lr, weight_decay=args.weight_decay
    )
    # A budget in minutes sets the length: the schedule follows the clock on any machine.
    start = last_save = time.monotonic()
    progress = 0.0
    first_part = 0.0 if args.init_from else FIRST_PART
    batches = training_batches(
        tokenizer,
        lambda: FIRST_SHARES if progress < first_part else LAST_SHARES,
        seed=args.seed,
        tokens_per_batch=args.tokens_per_batch,
    )
    log = earlier_log(args.init_from)
    losses: list[float] = []
    rights: dict[str, list[float]] = defaultdict(list)
    step, tokens = (log[-1]["step"], log[-1]["tokens"]) if log else (0, 0)
    tokens_before = tokens
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    while progress < 1:
        batch = next(batches)
        loss, right = next_token_loss(model, batch)
        loss.backward()
        minutes = (time.monotonic() - start) / 60
        progress = min(1.0, minutes / args.minutes)
        optimizer.step(learning_rate_scale(progress))
        losses.append(loss.item())
        for task, share in zip(batch.tasks, right.tolist(), strict=True):
            rights[task].append(share)
        step += 1
        tokens += batch.tokens.numel()
        if step % args.log_every == 0 or progress == 1:
            entry = {
                "step": step,
                "loss": sum(losses) / len(losses),
                "right": {task: sum(x) / len(x) for task, x in rights.items()},
                "tokens": tokens,
                "minutes": minutes,
            }
            log.append(entry)
            losses.clear()
            rights.clear()
            shares = " ".join(f"{task} {x:.3f}" for task, x in sorted(entry["right"].items()))
            speed = (tokens - tokens_before) / minutes / 60
            print(
                f"step {step} loss {entry['loss']:.4f} {speed:.0f} tokens/s "
                f"ETA {args.minutes - minutes:.1f} min; right: {shares}",
                flush=True,
            )
        if time.monotonic() - last_save > 60 * args.save_minutes:
            save(model, tokenizer, args.out)
            last_save = time.monotonic()
    save(model, tokenizer, args.out)
    (args.out / LOG_FILE).write_text(json.dumps(log))
    save_loss_curve(log, args.out / "loss_curve.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init-from", type=Path, help="target to go on with")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--muon-lr", type=float, default=5e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--log-every", type=int, default=50)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
