"""The steps of a training run, its log, and the state that a stopped run goes on from.

Steps draw their numbers from (seed, step), so that nothing but weights and optimiser is kept.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_dllm.tools.drafter.training.blocks import KnownSequence
from vllm_dllm.tools.drafter.training.feed import batches, draw_anchors
from vllm_dllm.tools.drafter.training.loss import drafting_loss
from vllm_dllm.tools.drafter.training.offline import mean_length, replay
from vllm_dllm.tools.drafter.training.options import Options
from vllm_dllm.tools.drafter.training.reference import DFlashDrafter
from vllm_dllm.tools.drafter.training.target_states import Target
from vllm_dllm.tools.pretrain.learning_rate import learning_rate_scale
from vllm_dllm.tools.pretrain.muon import MuonAdamW

STATE_FILE = "state.pt"  # while the run is unfinished
HELD_OUT_SHARE = 16  # one sequence in this many is held out, to see τ
MAX_HELD_OUT = 64
LOG_EVERY = 50  # steps
SAVE_EVERY_S = 60.0


def fit(
    target: Target,
    drafter: DFlashDrafter,
    sequences: list[KnownSequence],
    options: Options,
    partial: Path,
) -> list[dict[str, Any]]:
    """Trains in place; returns the log. Saves its state now and then, and when interrupted."""
    held_out = sequences[:: max(HELD_OUT_SHARE, len(sequences) // MAX_HELD_OUT)]
    learnt = [s for s in sequences if s not in held_out] or held_out
    optimizer = MuonAdamW(
        drafter,
        muon_lr=options.muon_lr,
        adam_lr=options.adam_lr,
        weight_decay=options.weight_decay,
    )
    step, elapsed, log = 0, 0.0, []
    state_file = partial / STATE_FILE
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        optimizer.load_state(state["optimizer"])
        step, elapsed, log = state["step"], state["elapsed_s"], state["log"]

    def save() -> None:
        state = {
            "drafter": drafter.state_dict(),
            "optimizer": optimizer.state(),
            "step": step,
            "elapsed_s": elapsed,
            "log": log,
        }
        unfinished = state_file.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(state_file)

    feed = batches(learnt, options, options.blocks_per_sequence)
    for _ in range(step):
        next(feed)
    clock = last_save = time.monotonic()
    losses: list[float] = []
    counts: list[float] = []
    while (progress := _progress(options, step, elapsed)) < 1:
        rows = next(feed)
        anchors, widths = draw_anchors(rows, options, step)
        loss, count = drafting_loss(drafter, target, rows, anchors, widths)
        loss.backward()
        scale = learning_rate_scale(progress, warmup=0.02, decay=0.6, head_start=1e-3)
        optimizer.step(scale)
        losses.append(loss.item())
        counts.append(count)
        step += 1
        now = time.monotonic()
        elapsed += now - clock
        clock = now
        if step % LOG_EVERY == 0:
            log.append(_log_entry(target, drafter, held_out, losses, counts, step, elapsed))
            _report(log[-1], options)
            losses.clear()
            counts.clear()
            # On the lines of the log: a resumed run averages the same steps.
            if now - last_save > SAVE_EVERY_S:
                save()
                last_save = now
    if losses:
        log.append(_log_entry(target, drafter, held_out, losses, counts, step, elapsed))
        _report(log[-1], options)
    return log


def _progress(options: Options, step: int, elapsed_s: float) -> float:
    if options.steps is not None:
        return step / options.steps
    assert options.minutes is not None
    return elapsed_s / (60 * options.minutes)


def _log_entry(
    target: Target,
    drafter: DFlashDrafter,
    held_out: list[KnownSequence],
    losses: list[float],
    counts: list[float],
    step: int,
    elapsed_s: float,
) -> dict[str, Any]:
    prompts = [s.tokens[: s.first_anchor] for s in held_out]
    answers = [s.tokens[s.first_anchor :] for s in held_out]
    draft_width = drafter.config.block_size - 1
    replayed = replay(target, drafter, prompts, answers, draft_width)
    return {
        "step": step,
        "loss": sum(losses) / len(losses),
        "right_before_wrong": sum(counts) / len(counts),
        "tau_held_out": mean_length([one.lengths(draft_width) for one in replayed]),
        "minutes": elapsed_s / 60,
    }


def _report(entry: dict[str, Any], options: Options) -> None:
    left = 1 / _progress(options, entry["step"], 60 * entry["minutes"]) - 1
    print(
        f"step {entry['step']} loss {entry['loss']:.4f} "
        f"right before wrong {entry['right_before_wrong']:.2f} "
        f"held-out τ {entry['tau_held_out']:.2f} ETA {entry['minutes'] * left:.1f} min",
        file=sys.stderr,
        flush=True,
    )
