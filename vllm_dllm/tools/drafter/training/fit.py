"""The steps of a training run, its log, and the state that a stopped run continues from.

Steps draw their random numbers from (seed, step), so only weights and optimiser are kept.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_dllm.tools.drafter.training.blocks import KnownSequence
from vllm_dllm.tools.drafter.training.feed import batches, draw_anchors
from vllm_dllm.tools.drafter.training.learning_rate import learning_rate_scale
from vllm_dllm.tools.drafter.training.loss import drafting_loss
from vllm_dllm.tools.drafter.training.means import Means
from vllm_dllm.tools.drafter.training.muon import MuonAdamW
from vllm_dllm.tools.drafter.training.offline import mean_length, replay
from vllm_dllm.tools.drafter.training.options import Options
from vllm_dllm.tools.drafter.training.reference import DFlashDrafter
from vllm_dllm.tools.drafter.training.target_states import Target

STATE_FILE = "state.pt"  # while the run is unfinished
HELD_OUT_SHARE = 16  # one sequence in this many is held out, to measure τ
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
    """Trains in place; returns the log. Saves its state in `partial` now and then."""
    held_out = sequences[:: max(HELD_OUT_SHARE, len(sequences) // MAX_HELD_OUT)]
    learnt = [s for s in sequences if s not in held_out] or held_out
    run = _Run(drafter, options, partial / STATE_FILE)
    feed = batches(learnt, options, options.blocks_per_sequence)
    for _ in range(run.step):
        next(feed)
    means = Means()
    run.start_clock()
    while run.progress < 1:
        rows = next(feed)
        anchors, widths = draw_anchors(rows, options, run.step)
        loss, count = drafting_loss(drafter, target, rows, anchors, widths)
        loss.backward()
        run.optimizer.step(
            learning_rate_scale(run.progress, warmup=0.02, decay=0.6, head_start=1e-3)
        )
        means.add(loss=loss.item(), right_before_wrong=count)
        run.count_step()
        if run.step % LOG_EVERY == 0:
            run.add({**means.take(), "tau_held_out": _mean_length(target, drafter, held_out)})
            # Only after a log entry, so that a resumed run averages the same steps.
            run.save_now_and_then()
    if means:
        run.add({**means.take(), "tau_held_out": _mean_length(target, drafter, held_out)})
    return run.log


class _Run:
    """How far training is, and the file that a stopped run continues from."""

    def __init__(self, drafter: DFlashDrafter, options: Options, state_file: Path) -> None:
        self.step = 0
        self.log: list[dict[str, Any]] = []
        self.elapsed_s = 0.0  # of all runs up to this step
        self.optimizer = MuonAdamW(
            drafter,
            muon_lr=options.muon_lr,
            adam_lr=options.adam_lr,
            weight_decay=options.weight_decay,
        )
        self._drafter = drafter
        self._options = options
        self._file = state_file
        if state_file.exists():
            self._load(torch.load(state_file, weights_only=True))

    def start_clock(self) -> None:
        self._clock = self._last_save = time.monotonic()

    @property
    def progress(self) -> float:
        """From 0 to 1, by steps or by time, as the options say."""
        if self._options.steps is not None:
            return self.step / self._options.steps
        assert self._options.minutes is not None
        return self.elapsed_s / (60 * self._options.minutes)

    def count_step(self) -> None:
        self.step += 1
        now = time.monotonic()
        self.elapsed_s += now - self._clock
        self._clock = now

    def add(self, entry: dict[str, Any]) -> None:
        """Logs `entry`, with step and minutes, and reports it."""
        self.log.append({"step": self.step, **entry, "minutes": self.elapsed_s / 60})
        left = (1 / self.progress - 1) * self.elapsed_s / 60
        print(
            f"step {self.step} loss {entry['loss']:.4f} "
            f"right before wrong {entry['right_before_wrong']:.2f} "
            f"held-out τ {entry['tau_held_out']:.2f} ETA {left:.1f} min",
            file=sys.stderr,
            flush=True,
        )

    def save_now_and_then(self) -> None:
        if self._clock - self._last_save > SAVE_EVERY_S:
            self._save()
            self._last_save = self._clock

    def _save(self) -> None:
        state = {
            "drafter": self._drafter.state_dict(),
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "log": self.log,
        }
        unfinished = self._file.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(self._file)

    def _load(self, state: dict[str, Any]) -> None:
        self._drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state(state["optimizer"])
        self.step, self.elapsed_s, self.log = state["step"], state["elapsed_s"], state["log"]


def _mean_length(target: Target, drafter: DFlashDrafter, held_out: list[KnownSequence]) -> float:
    """τ at the drafter's own width."""
    prompts = [s.tokens[: s.first_anchor] for s in held_out]
    answers = [s.tokens[s.first_anchor :] for s in held_out]
    draft_width = drafter.config.block_size - 1
    replayed = replay(target, drafter, prompts, answers, draft_width)
    return mean_length([one.lengths(draft_width) for one in replayed])
