"""Attention of a step full of canvases on a GPU: our kernel beside those of vLLM and PyTorch.

    python -m bench.attention

Both layer types of the 26B model, canvases of 256 tokens, bf16, pages of 16. Every system's numbers
are checked before it is timed. The last line is JSON, which also lands in bench/results/<gpu>/.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attention_kernels.api import attention
from attention_kernels.testing import PagedBatch, Request, rms_ratio
from bench import harness

CANVAS, PAGE, WINDOW = 256, 16, 1024
CONTEXTS, BATCHES = (0, 1024, 8192, 65536), (1, 8, 32)
MAX_RMS_RATIO = 0.01  # bf16 queries, weights and outputs
PEAK = {  # name prefix: (dense bf16 TFLOP/s, TB/s)
    "NVIDIA H200": (989.0, 4.8),
    "NVIDIA H100": (989.0, 3.35),
    "NVIDIA B200": (2250.0, 8.0),
}


@dataclass(frozen=True)
class Layer:
    num_heads: int
    num_kv_heads: int
    head_size: int
    window_left: int

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


LAYERS = {
    "sliding": Layer(16, 8, 256, WINDOW - 1),
    "full": Layer(16, 2, 512, -1),
}
Run = Callable[[], torch.Tensor]


def ours(batch: PagedBatch, layer: Layer, rule: str) -> Run:
    arguments = batch.arguments() | {"window_rule": rule, "output": torch.empty_like(batch.query)}
    return lambda: attention(**arguments, scale=layer.scale, window_left=layer.window_left)


def vllm_triton(batch: PagedBatch, layer: Layer) -> Run:
    """The kernel of `--attention-backend TRITON_ATTN`; its window is the symmetric rule."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    output = torch.empty_like(batch.query)
    ones = torch.ones(len(batch.seq_lens), layer.num_kv_heads, device=output.device)
    window = layer.window_left

    def run() -> torch.Tensor:
        unified_attention(
            q=batch.query,
            k=batch.key_cache,
            v=batch.value_cache,
            out=output,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=CANVAS,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.block_table.shape[1] * PAGE,
            softmax_scale=layer.scale,
            causal=batch.causal,
            window_size=(window, 0 if window >= 0 else -1),
            block_table=batch.block_table,
            softcap=0,
            q_descale=None,
            k_descale=ones,
            v_descale=ones,
        )
        return output

    return run


def vllm_fa4(batch: PagedBatch, layer: Layer) -> Run:
    """The kernel of `--attention-backend FLASH_ATTN` with FlashAttention-4, on Hopper."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    output = torch.empty_like(batch.query)
    window = [layer.window_left, layer.window_left]

    def run() -> torch.Tensor:
        flash_attn_varlen_func(
            q=batch.query,
            k=batch.key_cache,
            v=batch.value_cache,
            out=output,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=CANVAS,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.block_table.shape[1] * PAGE,
            softmax_scale=layer.scale,
            causal=layer.window_left < 0,
            window_size=window,
            block_table=batch.block_table,
            fa_version=4,
            dynamic_causal=batch.causal,
        )
        return output

    return run


def flex(batch: PagedBatch, layer: Layer) -> Run:
    """PyTorch's flex_attention over contiguous keys of equal length, which spares it the pages."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, length = len(batch.seq_lens), int(batch.seq_lens[0])
    positions = torch.arange(length, device=batch.query.device)
    pages = batch.block_table[:, positions // PAGE].long()
    key, value = (
        cache[pages, positions % PAGE].transpose(1, 2).contiguous()
        for cache in (batch.key_cache, batch.value_cache)
    )
    query = batch.query.view(n, CANVAS, *batch.query.shape[1:]).transpose(1, 2).contiguous()
    context, window = length - CANVAS, layer.window_left

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        back = q + context - k
        return (back <= window) & (back >= -window)

    block_mask = None
    if window >= 0:
        block_mask = create_block_mask(mask, None, None, CANVAS, length, device=query.device.type)
    compiled = torch.compile(flex_attention)

    def run() -> torch.Tensor:
        attended = compiled(
            query, key, value, block_mask=block_mask, scale=layer.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(0, 1)

    return run


def systems(batch: PagedBatch, layer: Layer) -> dict[str, tuple[Run, bool]]:
    """Name: what runs it, and whether its windows are symmetric."""
    return {
        "ours": (ours(batch, layer, "reference"), False),
        "ours, symmetric": (ours(batch, layer, "symmetric"), True),
        "vLLM TRITON_ATTN": (vllm_triton(batch, layer), True),
        "vLLM FLASH_ATTN 4": (vllm_fa4(batch, layer), True),
        "flex_attention": (flex(batch, layer), True),
    }


def random_batch(layer: Layer, context: int, batch: int, device: str) -> PagedBatch:
    return PagedBatch.random(
        [Request(CANVAS, context)] * batch,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        block_size=PAGE,
        dtype=torch.bfloat16,
        device=device,
    )


def usable_systems(device: str) -> list[str]:
    """Those whose numbers are right for every layer. One that does not run here is left out and
    named; one of ours that is wrong ends the bench."""
    usable: dict[str, bool] = {}
    for name, layer in LAYERS.items():
        batch = random_batch(layer, 2000, 2, device)
        for system, (run, symmetric) in systems(batch, layer).items():
            usable.setdefault(system, True)
            chosen = PagedBatch(
                **vars(batch) | {"symmetric": torch.full_like(batch.causal, int(symmetric))}
            )
            expected = chosen.reference(
                torch.float64, scale=layer.scale, window_left=layer.window_left
            )
            try:
                error = rms_ratio(run(), expected).max().item()
            except Exception as failure:  # whatever another system raises, it is named and left out
                if system.startswith("ours"):
                    raise
                print(f"{system} does not run {name} layers here: {failure!r}"[:300], flush=True)
                usable[system] = False
                continue
            print(f"{system}, {name} layers: worst row's RMS ratio {error:.4f}", flush=True)
            if error > MAX_RMS_RATIO:
                usable[system] = False
                if system.startswith("ours"):
                    raise harness.Refused(f"{system} is wrong on {name} layers: {error:.4f}.")
    return [system for system, is_usable in usable.items() if is_usable]


def time_ms(run: Run, repetitions: int) -> float:
    """One call, from events around many, so that the queue stays full."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repetitions


def work(layer: Layer, context: int, batch: int) -> tuple[float, float]:
    """(TFLOP, TB) that a call cannot do without: visible keys only, every key read once."""
    keys = CANVAS + (context if layer.window_left < 0 else min(context, layer.window_left))
    flop = 4 * batch * CANVAS * keys * layer.num_heads * layer.head_size
    rows = 2 * CANVAS * layer.num_heads + 2 * keys * layer.num_kv_heads
    return flop / 1e12, batch * rows * layer.head_size * 2 / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device, gpu = "cuda", torch.cuda.get_device_name()
    usable = usable_systems(device)
    peak_tflops, peak_tbs = next(
        (peak for prefix, peak in PEAK.items() if gpu.startswith(prefix)), (None, None)
    )
    cells = []
    for name, context, size in itertools.product(LAYERS, CONTEXTS, BATCHES):
        layer = LAYERS[name]
        batch = random_batch(layer, context, size, device)
        runs = {s: run for s, (run, _) in systems(batch, layer).items() if s in usable}
        times: dict[str, list[float]] = {system: [] for system in runs}
        for run in runs.values():
            time_ms(run, 3)
        repetitions = max(3, int(20 / max(time_ms(run, 3) for run in runs.values())))
        for turn in range(args.rounds):
            order = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
            for system in order:
                times[system].append(time_ms(runs[system], repetitions))
        tflop, tb = work(layer, context, size)
        cell: dict[str, Any] = {"layer": name, "context": context, "batch": size, "ms": {}}
        for system, values in times.items():
            cell["ms"][system] = measured = harness.spread(values)
            seconds = measured["median"] / 1000
            if peak_tflops is not None:
                measured["share_of_peak_flops"] = tflop / seconds / peak_tflops
                measured["share_of_peak_bandwidth"] = tb / seconds / peak_tbs
        others = [s for s in runs if not s.startswith("ours")]
        if others:
            best = min(others, key=lambda s: cell["ms"][s]["median"])
            cell["speedup_over_best"] = cell["ms"][best]["median"] / cell["ms"]["ours"]["median"]
            cell["best_other"] = best
        line = ", ".join(f"{s} {v['median']:.3f}" for s, v in cell["ms"].items())
        print(f"{name} context {context} batch {size}: {line}", flush=True)
        cells.append(cell)
        del batch, runs
        torch.cuda.empty_cache()
    report = {"machine": harness.machine() | {"gpu": gpu}, "canvas": CANVAS, "cells": cells}
    folder = gpu.replace("NVIDIA ", "").replace(" ", "-").lower()
    harness.publish(report, harness.ROOT / "bench" / "results" / folder / "attention.json")


if __name__ == "__main__":
    main()
