"""Trains the small autoregressive target.

    python -m checkpoints.recipes.train_target --out DIR

A Qwen3 of eight layers learns the next token of the answers to the tasks of `tasks.py`,
with the tokenizer and chat template of diffusiongemma-tiny. Long look-ups come only after the model
has had time to learn dense short ones: documents of 96 pairs alone teach a small model nothing.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from transformers import Qwen3ForCausalLM

from checkpoints.recipes.learning_rate import learning_rate_scale
from checkpoints.recipes.means import Means
from checkpoints.recipes.muon import MuonAdamW
from checkpoints.recipes.run_log import Entry, RunLog, earlier_log
from checkpoints.recipes.target_batches import Batch, training_batches
from checkpoints.recipes.target_model import initialize, save_target, target_config
from checkpoints.recipes.tasks import TRAINING_TASKS
from checkpoints.recipes.tokenizer import build_tokenizer

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
FIRST_PART = 0.3  # of the time, with FIRST_SHARES


def next_token_loss(model: Qwen3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy, and the weighted share of right best guesses of each row [B]."""
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits
    target = batch.tokens[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    loss = (loss * batch.weight.flatten()).sum() / batch.weight.sum()
    right = (logits.detach().argmax(-1) == target) * batch.weight
    return loss, right.sum(-1) / batch.weight.sum(-1)


def save_loss_curve(log: list[Entry], path: Path) -> None:
    figure = Figure(figsize=(11, 4.5))
    left, right = figure.subplots(1, 2)
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


def log_step(run: RunLog, losses: Means, rights: Means, tokens: int, new_tokens: int) -> None:
    entry: Entry = {**losses.take(), "right": rights.take(), "tokens": tokens}
    shares = " ".join(f"{task} {share:.3f}" for task, share in sorted(entry["right"].items()))
    speed = new_tokens / run.seconds
    run.add(entry, f"loss {entry['loss']:.4f} {speed:.0f} tokens/s, right: {shares},")


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
    progress = 0.0
    first_part = 0.0 if args.init_from else FIRST_PART
    batches = training_batches(
        tokenizer,
        lambda: FIRST_SHARES if progress < first_part else LAST_SHARES,
        seed=args.seed,
        tokens_per_batch=args.tokens_per_batch,
    )
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    earlier = earlier_log(args.init_from)
    tokens = tokens_before = earlier[-1]["tokens"] if earlier else 0
    run = RunLog(
        earlier,
        minutes=args.minutes,
        log_every=args.log_every,
        save_minutes=args.save_minutes,
        save=lambda: save_target(model, tokenizer, args.out, torch.bfloat16),
    )
    losses, rights = Means(), Means()
    while progress < 1:
        batch = next(batches)
        loss, right = next_token_loss(model, batch)
        loss.backward()
        progress = run.tick()
        optimizer.step(learning_rate_scale(progress, warmup=0.01, decay=0.5))
        losses.add(loss=loss.item())
        for task, share in zip(batch.tasks, right.tolist(), strict=True):
            rights.add(**{task: share})
        tokens += batch.tokens.numel()
        if run.count_step() or progress == 1:
            log_step(run, losses, rights, tokens, tokens - tokens_before)
        run.save_now_and_then()
    run.finish(args.out)
    save_loss_curve(run.entries, args.out / "loss_curve.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init-from", type=Path, help="target to continue from")
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
