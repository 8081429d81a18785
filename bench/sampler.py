"""One sampling step, ours and stock vLLM's: time and peak memory.

    python -m bench.sampler

From the hidden states of full canvases of 256 to the stored next canvases and soft embeddings: LM
head, soft cap, statistics, draw, acceptance, self-conditioning input. Rows are open (the entropy is
some nats) or decided (one token has nearly all); for decided ones, the self-conditioning input is
also made with a tolerance and from the top tokens only. Each case runs in its own process, and
cases take turns. On a GPU at the 26B model's size in bf16, on a CPU at an eighth of it in fp32,
where stock vLLM runs its PyTorch form. The last line is JSON, which also lands in
bench/results/<machine>/.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import nn

from bench import harness
from bench.stock_vllm import install_stand_in_torchvision
from tests import tolerances

CANVAS, SOFTCAP = 256, 30.0
REQUESTS = (1, 8, 32, 64)
DECIDED_REQUESTS = 8
OURS, STOCK = "ours", "stock vLLM"
APPROXIMATE: dict[str, dict[str, Any]] = {
    "ours, tolerance 0.001": {"tolerance": 1e-3},
    "ours, top 64": {"top_k": 64},
}
BUDGET_MIB = 256
RULES = {"entropy_bound": 0.1, "confidence_threshold": 0.005, "stability_threshold": 1}
T_MIN, T_MAX, STEPS = 0.4, 0.8, 48
Step = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Runs a step; returns best guesses [n, C], mean entropies [n] and soft embeddings [n, C, H]."""


class Inputs:
    """The same for both systems."""

    def __init__(self, num_requests: int, rows: str) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.vocab_size, self.hidden_size = (262_144, 2816) if on_gpu else (32_768, 352)
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, device=self.device)
            return drawn.to(self.dtype)

        self.num_requests = num_requests
        # Logits of standard deviation 3: a distribution that is neither flat nor decided.
        self.embeddings = normal(self.vocab_size, self.hidden_size)
        self.embeddings *= 3 * self.hidden_size**-0.5
        self.hidden = normal(num_requests * CANVAS, self.hidden_size)
        # The best guesses of the step before, for a canvas that is nearly done.
        self.tokens = torch.randint(
            self.vocab_size,
            (num_requests, CANVAS),
            generator=generator,
            device=self.device,
        )
        if rows == "decided":
            chosen = self.embeddings[self.tokens.flatten()]
            self.hidden = chosen * (25 / chosen.float().square().sum(-1, keepdim=True))
            self.hidden = self.hidden.to(self.dtype)


def ours(inputs: Inputs, **soft: Any) -> Step:
    from vllm_dllm.denoise import noise
    from vllm_dllm.denoise.row_stats import RowStats
    from vllm_dllm.denoise.step import CanvasState, StepRules, denoise_step, temperature
    from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
    from vllm_dllm.step.logits.canvas_logits import LogitTools, SamplingMemory
    from vllm_dllm.step.logits.filters import RuleContext
    from vllm_dllm.step.logits.soft_embedding import SoftEmbedding
    from vllm_dllm.step.logits.streamed_logits import StreamedLogits
    from vllm_dllm.step.slots import CanvasSlots, SlotNumbers

    class Head(DiffusionGemmaForBlockDiffusion):
        """The part of the model that the sampler calls."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.config = SimpleNamespace(
                final_logit_softcapping=SOFTCAP,
                vocab_size=inputs.vocab_size,
                tie_word_embeddings=True,
            )
            self.model = nn.Module()
            self.model.normalizer = inputs.hidden_size**0.5
            self.model.embed_tokens = SimpleNamespace(
                weight=inputs.embeddings,
                shard_indices=SimpleNamespace(
                    org_vocab_start_index=0, org_vocab_end_index=inputs.vocab_size
                ),
            )

    join_process_group()
    n, device, head = inputs.num_requests, inputs.device, Head()
    canvas = torch.zeros(n, CANVAS, dtype=torch.int64, device=device)
    slots = CanvasSlots(canvas, inputs.hidden_size, inputs.dtype)
    every = slice(0, n)
    slots.numbers[:, SlotNumbers._fields.index("num_steps")] = STEPS
    slots.tokens[:, 0] = inputs.tokens
    embedding = SoftEmbedding(head, **soft)
    batch: Any = SimpleNamespace(flatten=lambda grid: grid.flatten(0, 1))
    keys = noise.keys_from_seeds(torch.arange(n, device=device))
    starts = torch.full((n,), 100, device=device)
    lengths = torch.full((n,), CANVAS, device=device)
    filters: Any = SimpleNamespace(needs_whole_rows=lambda batch: [])
    rules, memory = StepRules(**RULES), SamplingMemory(BUDGET_MIB << 20)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers, tokens = slots.read_numbers(every), slots.read_tokens(every)
        scale = temperature(numbers.steps_done * 0, numbers.num_steps, T_MIN, T_MAX - T_MIN)
        drawn = noise.step_noise(
            keys, starts, lengths, numbers.steps_done, CANVAS, inputs.vocab_size
        )
        context = RuleContext(batch, starts, tokens.best_guess)
        logits = StreamedLogits(inputs.hidden, context, LogitTools(embedding, filters, memory))
        by_row, soft = logits.read(
            scale.repeat_interleave(CANVAS)[:, None], drawn.candidate.flatten()
        )
        stats = RowStats(*(column.view(n, CANVAS) for column in by_row))
        state = CanvasState(
            tokens.best_guess, numbers.times_repeated, numbers.steps_done, numbers.num_steps
        )
        outcome = denoise_step(stats, None, state, drawn.renoise, rules)
        slots.canvas[every] = outcome.canvas
        slots.soft_embeds[every] = soft.view(n, CANVAS, -1)
        slots.write_progress(
            every,
            outcome.state.best_guess,
            outcome.state.steps_done,
            outcome.finished,
            outcome.state.times_repeated,
        )
        return stats.best_guess, stats.entropy_nats.mean(-1), slots.soft_embeds

    return step


def stock(inputs: Inputs) -> Step:
    if inputs.device.type == "cpu":
        folder = Path(tempfile.mkdtemp())
        install_stand_in_torchvision(folder)
        sys.path.insert(0, str(folder))
    from vllm.model_executor.models import diffusion_gemma as dg
    from vllm.model_executor.models import diffusion_gemma_sampler as rows

    join_process_group()
    n, device = inputs.num_requests, inputs.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    every = torch.arange(n, device=device)
    canvas, guesses, steps = zeros(n, CANVAS), zeros(n, CANVAS), zeros(n, dtype=torch.int32)
    committing, confident = (zeros(n, dtype=torch.bool) for _ in range(2))
    history, history_len = zeros(n, 2, CANVAS), zeros(n)
    soft = zeros(n, CANVAS, inputs.hidden_size, dtype=torch.float32)
    max_steps = torch.full((n,), STEPS, dtype=torch.int32, device=device)
    pins, read_only = zeros(n, CANVAS, dtype=torch.bool), zeros(n, dtype=torch.bool)
    sampled, num_sampled = zeros(n, CANVAS), zeros(n, dtype=torch.int32)
    drafts, seeds = zeros(n, CANVAS), zeros(n, CANVAS)
    valid = torch.full((n,), CANVAS, device=device)
    normalizer = torch.tensor(inputs.hidden_size**0.5, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(inputs.hidden, inputs.embeddings)
        logits = logits.float().div_(SOFTCAP).tanh_().mul_(SOFTCAP)
        entropies = []
        # As many requests at once as half of the free memory holds, as its sampler does.
        free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else available_bytes()
        tile = max(1, int(free * 0.5) // (CANVAS * inputs.vocab_size * 4 * 3))
        for first in range(0, n, tile):
            own = every[first : first + tile]
            scale = torch.full((len(own),), T_MAX, device=device)
            piece = logits[first * CANVAS : (first + len(own)) * CANVAS]
            if device.type == "cuda":
                found = rows.sample_row_stats(piece, scale, CANVAS, 1, inputs.dtype)
            else:
                found = rows.sample_row_stats_reference(piece, scale, CANVAS, inputs.dtype)
            best, drawn, entropy, probs = (t.view(len(own), CANVAS, -1) for t in found)
            entropies.append(entropy.squeeze(-1).mean(-1))
            dg._compiled_sample_step(
                drawn.squeeze(-1), best.squeeze(-1), entropy.squeeze(-1), probs, own, own, every,
                valid[first : first + tile], canvas, guesses, steps, committing, confident, soft,
                inputs.embeddings, normalizer, history, history_len, max_steps, pins, seeds,
                read_only, sampled, num_sampled, drafts,
                confidence_threshold=RULES["confidence_threshold"], vocab_size=inputs.vocab_size,
                CL=CANVAS, ST=2, entropy_bound=RULES["entropy_bound"], sc_vocab_start=0,
                sc_vocab_end=inputs.vocab_size, tp_size=1, tp_group_name="",
            )  # fmt: skip
        return guesses, torch.cat(entropies), soft

    return step


def join_process_group() -> None:
    """vLLM's process group, with only this process in it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            1, 0, f"file:///tmp/bench-sampler-{os.getpid()}", 0, "gloo"
        )
        parallel_state.initialize_model_parallel()


def available_bytes() -> int:
    return psutil.virtual_memory().available


class PeakMemory:
    """Most bytes in use within the `with` block, beyond what was in use before."""

    def __enter__(self) -> "PeakMemory":
        self.bytes = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._before)

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated() - self._before
            return
        self._done.set()
        self._watcher.join()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.inference_mode()
def run_case(system: str, num_requests: int, rows: str) -> dict[str, Any]:
    inputs = Inputs(num_requests, rows)
    step = stock(inputs) if system == STOCK else ours(inputs, **APPROXIMATE.get(system, {}))
    with PeakMemory() as peak:
        best_guess, entropy, soft = step()
        wait()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    return {
        "ms": min(seconds) * 1000,
        "peak_mib": peak.bytes / 2**20,
        "best_guess_sum": int(best_guess.sum()),
        "entropy": entropy.mean().item(),
        "soft_size": soft.float().norm(dim=-1).mean().item(),
    }


def measure(system: str, num_requests: int, rows: str) -> dict[str, Any] | None:
    """None if it does not fit."""
    process = subprocess.run(
        [sys.executable, "-m", "bench.sampler", "--case", system, str(num_requests), rows],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        if "out of memory" in process.stderr.lower() or process.returncode == -9:
            return None
        raise SystemExit(f"{system}, {num_requests} requests: {process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def check(cell: dict[str, list[dict[str, Any]]]) -> None:
    """Raises Refused unless the systems that ran found the same from the same logits."""
    one, *others = (runs[0] for runs in cell.values() if runs)
    for other in others:
        same = one["best_guess_sum"] == other["best_guess_sum"]
        same &= abs(one["entropy"] - other["entropy"]) < tolerances.OTHER_SYSTEM
        same &= abs(one["soft_size"] / other["soft_size"] - 1) < tolerances.OTHER_SYSTEM
        if not same:
            raise harness.Refused(f"the systems disagree: {one} and {other}.")


def measure_cell(num_requests: int, rows: str, systems: list[str], rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for turn in range(rounds):
        for system in systems if turn % 2 else reversed(systems):
            if (run := measure(system, num_requests, rows)) is not None:
                runs[system].append(run)
        check(runs)
    cell: dict[str, Any] = {"requests": num_requests, "rows": rows}
    for system, measured in runs.items():
        if measured:
            cell[system] = {
                "ms": harness.spread([run["ms"] for run in measured]),
                "peak_mib": harness.spread([run["peak_mib"] for run in measured]),
            }
    if STOCK in cell:
        for system in [system for system in systems if system in cell and system != STOCK]:
            ratio = cell[STOCK]["ms"]["median"] / cell[system]["ms"]["median"]
            cell[system]["times_as_fast_as_stock"] = ratio
    print(json.dumps(cell), flush=True)
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--case", nargs=3, metavar=("SYSTEM", "REQUESTS", "ROWS"))
    args = parser.parse_args()
    if args.case:
        system, num_requests, rows = args.case
        print(json.dumps(run_case(system, int(num_requests), rows)))
        return
    cells = [measure_cell(n, "open", [OURS, STOCK], args.rounds) for n in args.requests]
    systems = [OURS, *APPROXIMATE, STOCK]
    cells.append(measure_cell(DECIDED_REQUESTS, "decided", systems, args.rounds))
    inputs = Inputs(1, "open")
    report = {
        "machine": harness.machine(),
        "vocabulary": inputs.vocab_size,
        "hidden": inputs.hidden_size,
        "dtype": str(inputs.dtype),
        "budget_mib": BUDGET_MIB,
        "cells": cells,
    }
    harness.publish(report, harness.results_folder() / "sampler.json")


if __name__ == "__main__":
    main()
