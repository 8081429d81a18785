"""Attention of a step full of canvases on a GPU: our kernel next to those of vLLM and PyTorch.

    python -m bench.attention

Both layer types of the 26B model, canvases of 256 tokens, bf16, pages of 16. Every system's numbers
are checked before it is timed. The last line is JSON, which also lands in bench/results/<gpu>/.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attention_kernels.api import Impl, attention
from attention_kernels.testing import PagedBatch, Request, allowed, rms_ratio
from bench import harness

CANVAS, PAGE, WINDOW = 256, 16, 1024
CONTEXTS, BATCHES = (0, 1024, 8192, 65536), (1, 8, 32)
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


def ours(batch: PagedBatch, layer: Layer, rule: str, impl: Impl = "triton") -> Run:
    arguments = batch.arguments() | {"window_rule": rule, "output": torch.empty_like(batch.query)}
    arguments["impl"] = impl
    return lambda: attention(**arguments, scale=layer.scale, window_left=layer.window_left)


def _vllm(kernel: Callable[..., Any], batch: PagedBatch, layer: Layer, **options: Any) -> Run:
    """A kernel of vLLM with the arguments that its attention backends have in common."""
    output = torch.empty_like(batch.query)

    def run() -> torch.Tensor:
        kernel(
            q=batch.query,
            k=batch.key_cache,
            v=batch.value_cache,
            out=output,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=CANVAS,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.block_table.shape[1] * PAGE,
            softmax_scale=layer.scale,
            block_table=batch.block_table,
            **options,
        )
        return output

    return run


def vllm_triton(batch: PagedBatch, layer: Layer) -> Run:
    """The kernel of `--attention-backend TRITON_ATTN`; its window is the symmetric rule."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    ones = torch.ones(len(batch.seq_lens), layer.num_kv_heads, device=batch.query.device)
    return _vllm(
        unified_attention,
        batch,
        layer,
        causal=batch.causal,
        window_size=(layer.window_left, 0 if layer.window_left >= 0 else -1),
        softcap=0,
        q_descale=None,
        k_descale=ones,
        v_descale=ones,
    )


def vllm_fa4(batch: PagedBatch, layer: Layer) -> Run:
    """The kernel of `--attention-backend FLASH_ATTN` with FlashAttention-4, on Hopper."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return _vllm(
        flash_attn_varlen_func,
        batch,
        layer,
        causal=layer.window_left < 0,
        window_size=[layer.window_left, layer.window_left],
        fa_version=4,
        dynamic_causal=batch.causal,
    )


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


OURS: dict[str, Callable[[PagedBatch, Layer], Run]] = {
    "ours": partial(ours, rule="reference"),
    "ours, symmetric": partial(ours, rule="symmetric"),
    "ours, FA4": partial(ours, rule="reference", impl="fa4"),
    "ours, FA4, symmetric": partial(ours, rule="symmetric", impl="fa4"),
}
OTHERS: dict[str, Callable[[PagedBatch, Layer], Run]] = {  # their windows are symmetric
    "vLLM TRITON_ATTN": vllm_triton,
    "vLLM FLASH_ATTN 4": vllm_fa4,
    "flex_attention": flex,
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


def captured(run: Run) -> Run:
    """`run` as a server replays it: without Python's overhead."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def worst_row(run: Run, batch: PagedBatch, layer: Layer, symmetric: bool) -> tuple[float, float]:
    """Largest RMS ratio of any row, against float64, and what rounding allows."""
    batch = replace(batch, symmetric=torch.full_like(batch.causal, int(symmetric)))
    right = allowed(batch, scale=layer.scale, window_left=layer.window_left)
    return rms_ratio(run(), right.expected).max().item(), right.row_ratio


def left_out(device: str, name: str) -> dict[str, str]:
    """Why some systems are not timed on a layer type: they do not run here, or are wrong.

    Raises:
        Refused: ours is wrong.
    """
    reasons: dict[str, str] = {}
    layer = LAYERS[name]
    batches = [random_batch(layer, 2000, size, device) for size in (1, 2)]
    for (system, prepare), batch in itertools.product((OURS | OTHERS).items(), batches):
        if system in reasons:
            continue
        symmetric = system in OTHERS or "symmetric" in system
        # Ours may say that FlashAttention-4 cannot serve a layer, or is not installed; any other
        # error of ours ends the bench. Whatever keeps another's kernel from running is reported.
        is_fa4 = system in OURS and "FA4" in system
        left_out_by = Exception if system in OTHERS else (ValueError, ImportError) if is_fa4 else ()
        try:
            error, most = worst_row(captured(prepare(batch, layer)), batch, layer, symmetric)
        except left_out_by as failure:
            reasons[system] = repr(failure)[:500]
            continue
        print(f"{name} layers, {system}: worst row's RMS ratio {error:.4f}", flush=True)
        if not error <= most:  # a NaN is also wrong
            if system in OURS:
                raise harness.Refused(f"{system} is wrong on {name} layers: {error:.4f}.")
            reasons[system] = f"worst row's RMS ratio {error:.4f}"
    for system, reason in reasons.items():
        print(f"{name} layers, LEFT OUT {system}: {reason}", flush=True)
    return reasons


def time_ms(run: Run, repetitions: int) -> float:
    """Time of one call, from events around many, so that the queue stays full."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repetitions


def work(layer: Layer, context: int, batch: int) -> tuple[float, float]:
    """The least (TFLOP, TB) a call needs: visible keys only, every key read once."""
    keys = CANVAS + (context if layer.window_left < 0 else min(context, layer.window_left))
    flop = 4 * batch * CANVAS * keys * layer.num_heads * layer.head_size
    rows = 2 * CANVAS * layer.num_heads + 2 * keys * layer.num_kv_heads
    return flop / 1e12, batch * rows * layer.head_size * 2 / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="canvases")
    parser.add_argument(
        "--without",
        choices=OTHERS,
        nargs="+",
        default=[],
        help="others' systems that end the process: a kernel that reads memory which is not its "
        "own takes the GPU from all that follow",
    )
    args = parser.parse_args()
    device, gpu = "cuda", torch.cuda.get_device_name()
    for system in args.without:
        del OTHERS[system]
    reasons = {name: left_out(device, name) for name in LAYERS}
    if any(reasons[name].keys() >= OTHERS.keys() for name in LAYERS):
        raise harness.Refused("no other system runs here to compare with.")
    peak = next((peak for prefix, peak in PEAK.items() if gpu.startswith(prefix)), None)
    cells = []
    for name, context, size in itertools.product(LAYERS, args.contexts, args.batches):
        layer = LAYERS[name]
        batch = random_batch(layer, context, size, device)
        timed = [system for system in OURS | OTHERS if system not in reasons[name]]
        runs = {s: captured((OURS | OTHERS)[s](batch, layer)) for s in timed}
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
            if peak is not None:
                measured["share_of_peak_flops"] = tflop / seconds / peak[0]
                measured["share_of_peak_bandwidth"] = tb / seconds / peak[1]
        medians = {system: measured["median"] for system, measured in cell["ms"].items()}
        best = min(medians.keys() & OTHERS.keys(), key=lambda s: medians[s])
        cell["best_other"] = best
        # The others' window is symmetric, so only our symmetric version compares like with like.
        cell["speedup"] = {s: medians[best] / medians[s] for s in medians.keys() & OURS.keys()}
        line = ", ".join(f"{s} {v['median']:.3f}" for s, v in cell["ms"].items())
        print(f"{name} context {context} batch {size}: {line}", flush=True)
        cells.append(cell)
        del batch, runs
        torch.cuda.empty_cache()
    report = {
        "machine": harness.machine(),
        "canvas": CANVAS,
        "without": args.without,
        "left_out": reasons,
        "cells": cells,
    }
    harness.publish(report, harness.results_folder() / "attention.json")


if __name__ == "__main__":
    main()
