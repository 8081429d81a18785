"""Cuts a GPU's kernel timeline into denoise steps, and says where a step's time goes.

    python -m bench.timeline TRACE.json.gz...

A trace is what `torch.profiler` exports. A step lasts from one LM head's product to the next.
"""

import argparse
import gzip
import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

APART_US = 3000  # products of one LM head are closer, those of two steps are further apart
LONG_GAP_US = 10  # idle for longer: the host is late
FIRST, LAST = 3, 1  # steps left out: the prompt's, and where a trace begins and ends
LM_HEAD = "LM head product"
KINDS = (  # in this order: what a kernel's name has, and the kind of work
    (("nvjet_sm90_tst_320x128",), LM_HEAD),
    (("_NNT",), "self-conditioning product"),  # alone reads its weights, embeddings, as they lie
    (
        ("_row_stats", "_read_blocks", "_weigh_kernel", "to_copy_tanh", "_settle"),
        "sampler kernels",
    ),
    (("temperature_and_noise", "_join_blocks", "_add_needed", "_store_soft"), "sampler kernels"),
    (("_pre_norm_kernel", "_gate_kernel", "_post_norm_kernel"), "self-conditioning kernels"),
    (("_add_kernel",), "self-conditioning kernels"),
    (("_gate_up_kernel", "_down_kernel"), "experts: products"),
    (("_sum_kernel",), "experts: around"),
    (("get_group_gemm_starts",), "experts: around"),
    (("group_gemm", "fused_moe_kernel", "marlin_moe"), "experts: products"),
    (("cutlass_3x_gemm",), "dense products"),
    (("_attention_kernel", "flash_fwd", "FlashAttentionForward", "_cut_kernel"), "attention"),
    (("reshape_and_cache",), "cache write"),
    (("moe", "finalizeMoe", "expandInput", "RadixSort", "ExpertOffsets"), "experts: around"),
    (("get_group_gemm", "gemma4_routing", "count_and_sort"), "experts: around"),
    (("scaled_fp8_quant", "_quantise_rows"), "quantising activations"),
    (("nvjet", "splitKreduce", "marlin"), "dense products"),
    (("act_and_mul",), "activation"),
    (("triton_",), "compiled elementwise, norms"),
    (("at::native", "at_cuda", "Memcpy", "Memset", "memset", "memcpy"), "torch small operations"),
)


def kind(name: str) -> str:
    """Of work, by a kernel's name."""
    return next((found for parts, found in KINDS if any(part in name for part in parts)), "other")


@dataclass(frozen=True)
class Step:
    """Times in us."""

    span: float
    idle: float
    late: float  # of the idle time, gaps in which the host was late
    kernels: int
    time: Counter[str]  # by kind of work
    number: Counter[str]


def read(path: Path) -> list[dict[str, Any]]:
    """The kernels and copies of a trace, by time."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = json.load(file)["traceEvents"]
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in device]
    return sorted(found, key=lambda event: event["ts"])


def steps(events: list[dict[str, Any]]) -> Iterator[Step]:
    heads = [i for i, event in enumerate(events) if kind(event["name"]) == LM_HEAD]
    firsts = [
        at
        for number, at in enumerate(heads)
        if number == 0 or events[at]["ts"] - events[heads[number - 1]]["ts"] > APART_US
    ]
    for begin, end in pairwise(firsts):
        part = events[begin:end]
        time, number = Counter[str](), Counter[str]()
        gaps, busy_until = [], part[0]["ts"]
        for event in [*part, events[end]]:
            gaps.append(max(0, event["ts"] - busy_until))
            busy_until = max(busy_until, event["ts"] + event["dur"])
        for event in part:
            time[kind(event["name"])] += event["dur"]
            number[kind(event["name"])] += 1
        late = sum(gap for gap in gaps if gap > LONG_GAP_US)
        span = events[end]["ts"] - part[0]["ts"]
        yield Step(span, sum(gaps), late, len(part), time, number)


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over steps, in ms.

    Raises:
        ValueError: the trace has no whole step of a GPU.
    """
    found = list(steps(events))
    found = found[FIRST:-LAST] if len(found) > FIRST + LAST + 2 else found
    if not found:
        raise ValueError(
            f"expected a trace of denoise steps on a GPU, got {len(events)} kernels and no step: "
            f"an LM head's product may have a name that bench.timeline does not know."
        )
    median_ms = {
        name: statistics.median(getattr(step, name) for step in found) / 1000
        for name in ("span", "idle", "late")
    }
    kinds = {name for step in found for name in step.time}
    by_kind = {
        name: {
            "ms": statistics.median(step.time[name] for step in found) / 1000,
            "kernels": statistics.median(step.number[name] for step in found),
        }
        for name in kinds
    }
    largest_first = sorted(by_kind.items(), key=lambda item: -item[1]["ms"])
    return {
        "steps": len(found),
        **{f"{name}_ms": ms for name, ms in median_ms.items()},
        "kernels": statistics.median(step.kernels for step in found),
        "by_kind": dict(largest_first),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A table for people."""
    yield (
        f"{found['steps']} steps of {found['span_ms']:.3f} ms, {found['kernels']:.0f} kernels, "
        f"idle {found['idle_ms']:.3f} ms, {found['late_ms']:.3f} of it while the host was late"
    )
    for name, each in found["by_kind"].items():
        share = each["ms"] / found["span_ms"]
        yield f"  {each['ms']:8.3f} ms {share:6.1%} {each['kernels']:6.0f}  {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    for path in parser.parse_args().traces:
        print(path.name)
        print(*lines(summary(read(path))), sep="\n")


if __name__ == "__main__":
    main()
