"""A training run of so many steps that may be stopped at any time and then continues.

What a step does depends on its number, the seed, the weights and the optimiser's state alone, so a
run that was stopped ends with the same weights as one that was not.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from checkpoints.recipes.means import Means
from checkpoints.recipes.muon import MuonAdamW
from checkpoints.recipes.run_log import Entry

SAVE_SECONDS = 120.0


def run_steps(
    module: nn.Module,
    optimizer: MuonAdamW,
    one_step: Callable[[random.Random, int], dict[str, float]],
    *,
    steps: int,
    seed: int,
    state: Path,
    log_every: int,
) -> list[Entry]:
    """Runs `one_step(rng, step)` for each step that `state` has not seen. Returns the log.

    one_step: returns values to log; torch's own random numbers are seeded before it.
    """
    done, entries = 0, []
    if state.exists():
        saved = torch.load(state, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state(saved["optimizer"])
        done, entries = saved["step"], saved["entries"]
        print(f"continues from step {done}", flush=True)
    means = Means()
    started = last_save = time.monotonic()
    first = done
    for step in range(done, steps):
        torch.manual_seed(seed * 1_000_003 + step)
        means.add(**one_step(random.Random(f"{seed} {step}"), step))
        done = step + 1
        if done % log_every == 0 or done == steps:
            entries.append({"step": done, **means.take()})
            shown = " ".join(f"{k} {v:.4f}" for k, v in entries[-1].items() if k != "step")
            pace = (time.monotonic() - started) / (done - first)
            left = pace * (steps - done) / 60
            print(f"step {done} {shown} {pace:.2f} s/step ETA {left:.1f} min", flush=True)
        if time.monotonic() - last_save > SAVE_SECONDS or done == steps:
            save_state(module, optimizer, done, entries, state)
            last_save = time.monotonic()
    return entries


def save_state(
    module: nn.Module, optimizer: MuonAdamW, step: int, entries: list[Entry], path: Path
) -> None:
    """Replaces `path` in one step, so that an interruption leaves the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    torch.save(
        {
            "module": module.state_dict(),
            "optimizer": optimizer.state(),
            "step": step,
            "entries": entries,
        },
        unfinished,
    )
    unfinished.replace(path)
