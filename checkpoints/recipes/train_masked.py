"""Trains the small masked model, of SDAR's architecture.

    python -m checkpoints.recipes.train_masked \\
        --init-from checkpoints/qwen3-tiny-target --out DIR

As SDAR is made: an autoregressive Qwen3 learns to fill blocks of masks. Each batch has another
block length, so one model serves all of them. The number of steps is fixed, not the time.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from transformers import Qwen3ForCausalLM

from checkpoints.recipes.learning_rate import learning_rate_scale
from checkpoints.recipes.masked_batches import MASK_TOKEN, Batch, masked_batches
from checkpoints.recipes.masked_heads import ask_from_the_next_position
from checkpoints.recipes.means import Means
from checkpoints.recipes.muon import MuonAdamW
from checkpoints.recipes.run_log import Entry, earlier_log, write_log
from checkpoints.recipes.target_model import save_target
from checkpoints.recipes.tokenizer import build_tokenizer
from checkpoints.recipes.train_target import LAST_SHARES

LATER_RUNS = {
    "sums": LAST_SHARES | {"add": 4.0, "lookup": 1.0},
    "forms": LAST_SHARES | {"sort": 4.0, "write_json": 3.0, "count_up": 1.5, "lookup": 1.0},
}
"""Shares of tasks by run. Digits of sums, then letters in order and the fields of JSON are few
tokens of all answers, and come last."""
BLOCK_LENGTH = 4
"""What config.json says; --hf-overrides chooses another."""


def masked_loss(model: Qwen3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of what the masks hide, and of each row [R] the weighted share of
    right best guesses."""
    hidden = model.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=additive(batch.visible),
        use_cache=False,
    ).last_hidden_state
    asked = batch.weight > 0
    logits = model.lm_head(hidden[asked])
    target, weight = batch.target[asked], batch.weight[asked]
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    right = torch.zeros_like(batch.weight)
    right[asked] = (logits.detach().argmax(-1) == target) * weight
    return loss, right.sum(-1) / batch.weight.sum(-1)


def additive(visible: Tensor) -> Tensor:
    """[R, 1, S, S] float32, for transformers' attention."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(visible.shape).masked_fill(~visible, lowest)[:, None]


def save_masked(model: Qwen3ForCausalLM, mask_id: int, path: Path) -> None:
    """Writes SDAR's layout, in bf16."""
    save_target(model, build_tokenizer(), path, torch.bfloat16)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": BLOCK_LENGTH,
        "mask_token_id": mask_id,
    }
    file.write_text(json.dumps(config, indent=2) + "\n")


def save_loss_curve(log: list[Entry], path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([e["step"] for e in log], [e["loss"] for e in log])
    left.set(xlabel="step", ylabel="weighted cross entropy (nats)", yscale="log")
    for task in LAST_SHARES:
        points = [(e["step"], 1 - e["right"][task]) for e in log if task in e["right"]]
        right.plot(*zip(*points, strict=True), label=task)
    right.set(xlabel="step", ylabel="wrong tokens, at random masks", ylim=(0, 1))
    right.legend()
    figure.savefig(path, dpi=80)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    mask_id = tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    assert isinstance(mask_id, int)
    model = Qwen3ForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
    if args.later is None:
        ask_from_the_next_position(model)
    optimizer = MuonAdamW(model, muon_lr=args.muon_lr, adam_lr=args.adam_lr, weight_decay=0.05)
    shares = LATER_RUNS[args.later] if args.later else LAST_SHARES
    batches = masked_batches(
        tokenizer, shares, mask_id=mask_id, seed=args.seed, tokens_per_batch=args.tokens
    )
    args.out.mkdir(parents=True, exist_ok=True)
    log = earlier_log(args.init_from) if args.later else []
    done = log[-1]["step"] if log else 0
    losses, rights, started = Means(), Means(), time.monotonic()
    for step in range(1, args.steps + 1):
        batch = next(batches)
        loss, right = masked_loss(model, batch)
        loss.backward()
        optimizer.step(learning_rate_scale(step / (args.steps + 1), warmup=0.02, decay=0.5))
        losses.add(loss=loss.item())
        for task, share in zip(batch.tasks, right.tolist(), strict=True):
            rights.add(**{task: share})
        if step % args.log_every == 0 or step == args.steps:
            log.append({"step": done + step, **losses.take(), "right": rights.take()})
            shown = " ".join(
                f"{task} {share:.3f}" for task, share in sorted(log[-1]["right"].items())
            )
            seconds = (time.monotonic() - started) / step
            print(
                f"step {step} loss {log[-1]['loss']:.4f} {seconds:.2f} s, right: {shown}",
                flush=True,
            )
        if step % args.save_every == 0 or step == args.steps:
            save_masked(model, mask_id, args.out)
            write_log(log, args.out)
    save_loss_curve(log, args.out / "loss_curve.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--init-from", type=Path, required=True, help="an autoregressive Qwen3, or the run before"
    )
    parser.add_argument("--later", choices=LATER_RUNS, help="a later run, mostly of these tasks")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--save-every", type=int, default=250)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
