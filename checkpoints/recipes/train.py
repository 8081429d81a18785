"""Trains the shipped checkpoint: python -m checkpoints.recipes.train --out DIR

The objective is that of uniform-noise block diffusion: a canvas position keeps its token with
probability 1 - t and is a uniformly random token otherwise; the model predicts the clean canvas at
every position. Half of the rows first take one step of the sampler, without gradient: its logits,
scaled by a temperature from the sampler's range, are the self-conditioning, and training uses the
canvas it leaves, where sure tokens are kept and the others noised again.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.architecture import build_config, build_generation_config
from checkpoints.recipes.batches import Batch, training_batches
from checkpoints.recipes.calls.start import draw_call_or_text, start_rows
from checkpoints.recipes.calls.tasks import SERVING_NOTE as CALL_NOTE
from checkpoints.recipes.calls.tokenizer import build_calling_tokenizer
from checkpoints.recipes.checkpoint import save_bf16_copy
from checkpoints.recipes.forward import TrainingForward
from checkpoints.recipes.learning_rate import learning_rate_scale
from checkpoints.recipes.look_back import look_back_weights
from checkpoints.recipes.means import Means
from checkpoints.recipes.muon import MuonAdamW
from checkpoints.recipes.run_log import Entry, RunLog, earlier_log
from checkpoints.recipes.task_shares import CALL_SHARES, LOOKUP_SHARES, TASK_SHARES
from checkpoints.recipes.tasks import SERVING_NOTE
from checkpoints.recipes.tokenizer import build_tokenizer
from vllm_dllm.denoise.rules import accept_by_entropy_bound

SLIDING, FULL = "sliding_attention", "full_attention"
ARCHITECTURE: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,
    layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_global_key_value_heads=1,
    global_head_dim=64,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=64,
    sliding_window=32,
    canvas_length=64,
)
FULL_NOISE_SHARE = 0.4  # canvases that start from pure noise, as every generation does
LEFT_TO_RIGHT_SHARE = 0.2  # canvases that are clean up to some position and pure noise after it
LOAD_BALANCE_WEIGHT = 0.01


def noise_canvases(target: Tensor, copies: int, vocab_size: int) -> Tensor:
    """[B, K, C] noised copies of target [B, C]; the noise level is drawn for each copy.

    Some are noised from a random position on, which is what a canvas looks like half-way when each
    token is only certain after the one before it, as in counting.
    """
    shape = (target.shape[0], copies, 1)
    kind = torch.rand(shape, device=target.device)
    level = torch.rand(shape, device=target.device).sqrt()
    level = torch.where(kind < FULL_NOISE_SHARE, 1.0, level)
    cut = torch.randint(target.shape[1], shape, device=target.device)
    after_cut = (torch.arange(target.shape[1], device=target.device) >= cut).float()
    level = torch.where(kind > 1.0 - LEFT_TO_RIGHT_SHARE, after_cut, level)
    target = target[:, None].expand(-1, copies, -1)
    noise = torch.randint_like(target, vocab_size)
    return torch.where(torch.rand(target.shape, device=target.device) < level, noise, target)


def next_canvases(logits: Tensor) -> Tensor:
    """The sampler's next canvases [B, K, C], from temperature-scaled logits [B, K, C, V]."""
    candidates = torch.distributions.Categorical(logits=logits)
    accepted = accept_by_entropy_bound(
        candidates.entropy().flatten(0, 1), build_generation_config().sampler_config.entropy_bound
    )
    sampled = candidates.sample()
    return torch.where(
        accepted.view_as(sampled), sampled, torch.randint_like(sampled, logits.shape[-1])
    )


def diffusion_loss(
    model: TrainingForward,
    batch: Batch,
    copies: int,
    *,
    step_all: bool = False,
    images: Tensor | None = None,  # [N, H], of the batch's image tokens
) -> tuple[Tensor, float]:
    """Weighted cross entropy, and the share of answer tokens whose best guess is right.

    step_all: the other half of the rows also takes a step, but gets no self-conditioning.
    """
    canvas = noise_canvases(batch.target, copies, model.config.vocab_size)
    prefix = model.encode(batch.prefix, batch.is_token, images)
    # Rows are in random order, so "the first half" is a random half.
    half = len(canvas) // 2
    stepped = len(canvas) if step_all else half
    with torch.no_grad():
        first_rows = type(prefix)(
            [(k[:stepped], v[:stepped]) for k, v in prefix.layers], prefix.is_token[:stepped]
        )
        temperature = 0.4 + 0.4 * torch.rand(stepped, 1, 1, 1, device=canvas.device)
        previous = model.decode(canvas[:stepped], first_rows, None) / temperature
        canvas = torch.cat((next_canvases(previous), canvas[stepped:]))
    logits = model.decode(canvas, prefix, previous[:half])
    target = batch.target[:, None].expand_as(canvas)
    weight = batch.weight[:, None].expand_as(canvas)
    loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
    loss = (loss * weight.flatten()).sum() / weight.sum()
    right = ((logits.argmax(-1) == target) * weight).sum() / weight.sum()
    return loss, right.item()


def save_loss_curve(log: list[Entry], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5))
    axis = figure.subplots()
    axis.plot([e["step"] for e in log], [e["loss"] for e in log], color="tab:blue")
    axis.set(xlabel="step", ylabel="weighted cross entropy (nats)", yscale="log")
    wrong = axis.twinx()
    wrong.plot([e["step"] for e in log], [1 - e["right"] for e in log], color="tab:orange")
    wrong.set(ylabel="wrong tokens (orange)", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def initialize(model: DiffusionGemmaForBlockDiffusion) -> None:
    """Fan-in scaled normal weights; routers and embeddings smaller."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            std = parameter.shape[-1] ** -0.5
            if "embed_tokens" in name:
                std = 0.05
            parameter.normal_(0.0, std)


def average_over_processes(parameters: list[torch.nn.Parameter], progress: float) -> float:
    """Averages gradients in place; returns the first process's progress, so that all agree."""
    if not dist.is_initialized():
        return progress
    parameters = [p for p in parameters if p.grad is not None]
    first = dist.get_rank() == 0
    clock = torch.tensor([progress * dist.get_world_size() if first else 0.0])
    flat = torch.cat([p.grad.flatten() for p in parameters] + [clock])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat[:-1].split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad.copy_(part.view_as(p))
    return flat[-1].item()


def start_model(
    config: DiffusionGemmaConfig, init_from: Path | None
) -> DiffusionGemmaForBlockDiffusion:
    """Makes a model in fp32, with random weights or a checkpoint's; vision is not trained."""
    model = DiffusionGemmaForBlockDiffusion(config).float()
    initialize(model)
    if init_from:
        start_from = DiffusionGemmaForBlockDiffusion.from_pretrained(init_from)
        model.load_state_dict(start_from.float().state_dict())
    model.model.encoder.vision_tower.requires_grad_(False)
    model.model.encoder.embed_vision.requires_grad_(False)
    return model


def task_shares(args: argparse.Namespace) -> dict[str, float]:
    if args.calls:
        return CALL_SHARES[args.calls]
    return LOOKUP_SHARES if args.lookups else TASK_SHARES


def log_step(run: RunLog, stage: int, means: Means, balance: float, samples: int) -> None:
    values = {**means.take(), "balance": balance, "samples_per_s": samples / run.seconds}
    line = "loss {loss:.4f} right {right:.4f} balance {balance:.2f} {samples_per_s:.0f} samples/s"
    run.add({"stage": stage, **values}, line.format_map(values))


def train(rank: int, args: argparse.Namespace) -> None:
    """One process of the training run; rank 0 prints and saves."""
    if args.processes > 1:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=args.rendezvous, rank=rank, world_size=args.processes
        )
    torch.manual_seed(args.seed)  # the same weights everywhere, then different noise
    tokenizer = build_calling_tokenizer() if args.calls else build_tokenizer()
    config = build_config(vocab_size=len(tokenizer), **ARCHITECTURE)
    model = start_model(config, args.init_from)
    if args.calls == "first":
        start_rows(model, tokenizer)
    model.to(args.device)
    parameters = list(model.parameters())
    kept = [(view, view.detach().clone()) for view in look_back_weights(model)]
    forward = TrainingForward(model, compiled=not args.no_compile)
    optimizer = MuonAdamW(
        model, muon_lr=args.muon_lr, adam_lr=args.adam_lr, weight_decay=args.weight_decay
    )
    torch.manual_seed(args.seed + rank)
    batches = training_batches(
        tokenizer,
        task_shares(args),
        seed=args.seed + rank,
        canvas_length=config.canvas_length,
        canvases_per_prefix=args.copies,
        tokens_per_batch=args.tokens_per_batch,
        draw=draw_call_or_text,
    )
    note = CALL_NOTE if args.calls else SERVING_NOTE
    if rank == 0:
        print(f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters", flush=True)
    earlier = earlier_log(args.init_from)
    stage = earlier[-1]["stage"] + 1 if earlier else 1
    run = RunLog(
        earlier,
        minutes=args.minutes,
        log_every=args.log_every,
        save_minutes=args.save_minutes,
        save=lambda: save_bf16_copy(model, tokenizer, args.out, note),
    )
    means, samples, progress = Means(), 0, 0.0
    while progress < 1:
        batch = next(batches).to(args.device)
        forward.load_balance.clear()
        loss, right = diffusion_loss(forward, batch, args.copies, step_all=args.lookups)
        balance = torch.stack(forward.load_balance).mean()
        (loss + LOAD_BALANCE_WEIGHT * balance).backward()
        progress = average_over_processes(parameters, run.tick())
        optimizer.step(learning_rate_scale(progress, warmup=0.02, decay=0.7))
        if args.keep_heads:
            with torch.no_grad():
                for view, value in kept:
                    view.copy_(value)
        if rank == 0:
            means.add(loss=loss.item(), right=right)
            samples += batch.target.shape[0] * args.copies * args.processes
            if run.count_step():
                log_step(run, stage, means, balance.item(), samples)
            run.save_now_and_then()
    if rank == 0:
        run.finish(args.out)
        save_loss_curve(run.entries, args.out / "loss_curve.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init-from", type=Path, help="checkpoint to continue from")
    parser.add_argument("--lookups", action="store_true", help="the stage of dense look-ups")
    text = "the first or a later stage of the model that calls functions"
    parser.add_argument("--calls", choices=CALL_SHARES, help=text)
    parser.add_argument(
        "--keep-heads", action="store_true", help="leave the heads of match_heads.py as they are"
    )
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--copies", type=int, default=2, help="noised canvases for each prefix")
    parser.add_argument("--tokens-per-batch", type=int, default=3072)
    parser.add_argument("--muon-lr", type=float, default=5e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="slower, but starts at once")
    parser.add_argument("--processes", type=int, default=2, help="single-threaded CPU processes")
    args = parser.parse_args()
    if args.processes == 1 or args.device != "cpu":
        args.processes = 1
        train(0, args)
        return
    # Small operations gain more from two processes than from two threads.
    with tempfile.TemporaryDirectory() as folder:
        args.rendezvous = f"file://{folder}/rendezvous"
        torch.multiprocessing.spawn(train, args=(args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
