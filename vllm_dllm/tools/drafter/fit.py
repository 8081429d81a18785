"""Runs the steps of a training. Keeps the log, and the state from which a stopped run continues.

Random numbers come from (seed, step), so the state has only weights, optimisers and the log.
"""

import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_dllm.tools.drafter.blocks import drafting_loss
from vllm_dllm.tools.drafter.measurements import mean_length, replay
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target
from vllm_dllm.tools.drafter.sequences import KnownSequence

STATE_FILE = "state.pt"  # kept while the run is unfinished
UNFINISHED_STATE_FILE = "state.tmp"  # left by a run that was killed while it saved its state
HELD_OUT_SHARE = 16  # one sequence in this many is held out, to measure τ
MAX_HELD_OUT = 64
LOG_EVERY = 50  # steps
SAVE_EVERY_S = 60.0
WARMUP, DECAY = 0.02, 0.6  # shares of the run in which the learning rate rises and falls to 0


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training run, as `vllm-dllm drafter train` gets them."""

    block_size: int = 16
    """Slots of a block: the anchor and the tokens drafted after it."""
    num_layers: int = 3
    target_layer_ids: tuple[int, ...] | None = None
    """The target's layers, from 0, whose outputs are the context. None: as many as the drafter has
    layers, spread as in the published drafters."""
    mask_token: str | None = None
    """Text of a token that is never written; None: the tokenizer's mask token."""
    minutes: float | None = None
    steps: int | None = None
    """The length of the run: exactly one of `minutes` and `steps` is set."""
    seed: int = 0
    max_tokens: int = 256
    """The most tokens of an answer."""
    blocks_per_sequence: int = 8
    """The most blocks of a sequence in a step, each after a different anchor."""
    tokens_per_batch: int = 4096
    """The most tokens of context and slots of blocks in a step, padding included."""
    narrow_share: float = 0.25
    """Share of blocks that are narrower than `block_size`, so that short drafts are learnt as
    well."""


class Batch(NamedTuple):
    """The blocks that one step trains on."""

    rows: list[KnownSequence]
    anchors: list[list[int]]  # [B][N], indices of the blocks' anchors; -1: no block
    widths: list[list[int]]  # [B][N], slots of each block, anchor included


@dataclass
class TrainingState:
    """What a stopped run continues from."""

    drafter: DFlashDrafter
    optimizers: list[torch.optim.Optimizer]
    step: int = 0  # of all runs
    elapsed_s: float = 0.0  # of all runs
    log: list[dict[str, Any]] = field(default_factory=list)

    def load(self, file: Path) -> None:
        """Sets all fields to what `save` has written; drafter and optimisers in place."""
        saved = torch.load(file, weights_only=True)
        self.drafter.load_state_dict(saved["drafter"])
        for optimizer, its_state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
        self.step, self.elapsed_s, self.log = saved["step"], saved["elapsed_s"], saved["log"]

    def save(self, file: Path) -> None:
        """Writes the state by way of `UNFINISHED_STATE_FILE`, and replaces `file` in one step.
        Raises OSError if writing fails."""
        content = {
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "log": self.log,
        }
        unfinished = file.with_name(UNFINISHED_STATE_FILE)
        try:
            torch.save(content, unfinished)
        except RuntimeError as error:
            raise OSError(f"{unfinished} cannot be written: {error}") from error
        unfinished.replace(file)

    def progress(self, options: TrainingOptions) -> float:
        """Returns which share of the run is done, from 0, in steps or in time, as the options say.
        It may be above 1."""
        if options.steps is not None:
            return self.step / options.steps
        assert options.minutes is not None
        return self.elapsed_s / (60 * options.minutes)


def fit(
    target: Target,
    drafter: DFlashDrafter,
    sequences: list[KnownSequence],
    options: TrainingOptions,
    folder: Path,
) -> list[dict[str, Any]]:
    """Trains the drafter in place, and returns the log: for every `LOG_EVERY` steps the loss in
    nats, τ of held-out sequences, and the minutes of training. Prints each entry. Saves the state
    in `folder` every minute, and continues from a state that is there."""
    held_out = sequences[:: max(HELD_OUT_SHARE, len(sequences) // MAX_HELD_OUT)]
    learnt = [s for s in sequences if s not in held_out] or held_out
    learnt.sort(key=lambda sequence: len(sequence.tokens))
    state = TrainingState(drafter, _make_optimizers(drafter))
    if (state_file := folder / STATE_FILE).exists():
        state.load(state_file)
    clock = saved_at = time.monotonic()
    losses: list[float] = []
    progress = state.progress(options)
    while progress < 1:
        scale = min(1, (progress + 1e-3) / WARMUP) * min(1, (1 - progress) / DECAY)
        losses.append(_train_step(target, state, draw_batch(learnt, options, state.step), scale))
        state.step += 1
        now = time.monotonic()
        state.elapsed_s += now - clock
        clock = now
        progress = state.progress(options)
        if state.step % LOG_EVERY and progress < 1:
            continue
        tau = _mean_length(target, drafter, held_out)
        loss, minutes = sum(losses) / len(losses), state.elapsed_s / 60
        losses = []
        entry = {"step": state.step, "loss": loss, "tau_held_out": tau, "minutes": minutes}
        state.log.append(entry)
        print(
            f"Step {state.step}: loss {loss:.3f}, {tau:.2f} tokens per verification on held-out "
            f"prompts, {max(0, 1 / progress - 1) * minutes:.1f} minutes left",
            file=sys.stderr,
            flush=True,
        )
        # Only after a log entry, so that a resumed run averages the same steps.
        if clock - saved_at > SAVE_EVERY_S:
            state.save(state_file)
            saved_at = clock
    return state.log


def _train_step(target: Target, state: TrainingState, batch: Batch, scale: float) -> float:
    """Updates drafter and optimisers, and returns the loss in nats. `scale`: the learning rate as a
    share of the full one."""
    loss_nats = drafting_loss(state.drafter, target, *batch)
    loss_nats.backward()
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * scale
        optimizer.step()
        optimizer.zero_grad()
    return loss_nats.item()


def _make_optimizers(drafter: DFlashDrafter) -> list[torch.optim.Optimizer]:
    """Returns Muon for matrices, with updates of AdamW's size, and AdamW for norms. Each group of
    parameters keeps its full learning rate as `full_lr`."""
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    rest = [p for p in drafter.parameters() if p.dim() != 2]
    optimizers = [
        torch.optim.Muon(matrices, 5e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, 2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def draw_batch(
    sequences: list[KnownSequence],  # sorted from short to long
    options: TrainingOptions,
    step: int,
) -> Batch:
    """Returns sequences of similar length with about `tokens_per_batch` tokens and slots, and the
    anchors and widths of their blocks. The same seed and step give the same batch."""
    rng = random.Random(f"{options.seed} {step}")
    start = rng.randrange(len(sequences))
    rows: list[KnownSequence] = []
    for row in sequences[start:]:
        padded = len(row.tokens) + options.blocks_per_sequence * options.block_size
        if rows and (len(rows) + 1) * padded > options.tokens_per_batch:
            break
        rows.append(row)
    anchors: list[list[int]] = []
    for row in rows:
        choices = range(row.first_anchor, len(row.tokens) - 1)
        anchors.append(rng.sample(choices, min(len(choices), options.blocks_per_sequence)))
    num_blocks = max(map(len, anchors))
    widths = [
        [
            rng.randint(2, options.block_size)
            if rng.random() < options.narrow_share
            else options.block_size
            for _ in range(num_blocks)
        ]
        for _ in rows
    ]
    return Batch(rows, [row + [-1] * (num_blocks - len(row)) for row in anchors], widths)


def _mean_length(target: Target, drafter: DFlashDrafter, held_out: list[KnownSequence]) -> float:
    """Returns τ of the held-out sequences, with drafts as wide as the drafter's block."""
    prompts = [s.tokens[: s.first_anchor] for s in held_out]
    answers = [s.tokens[s.first_anchor :] for s in held_out]
    draft_width = drafter.config.block_size - 1
    replayed = replay(target, drafter, prompts, answers, draft_width)
    return mean_length([one.emitted_lengths(draft_width) for one in replayed])
