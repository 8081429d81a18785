"""The stages of a quarter of an hour, by value, with the commands and limits of each, and others
for which it has no room. Nothing heavy runs beside engines that start: they would be late."""

import json
from dataclasses import dataclass, field

KERNELS = ["tests/unit/attention_kernels", "tests/unit/attention", "tests/unit/denoise"]
KERNELS += ["tests/unit/step", "tests/unit/drafters", "tests/unit/experts"]
PAIR = ["bench.full_shape", "--unchecked", "--rounds", "2", "--stock-most", "32"]
SMALL = ["bench.full_shape", "--unchecked", "--rounds", "1", "--shape", "small", "--eager"]
SMALL += ["--kv-cache-gib", "1", "--cells", "1x128"]
ONLY_OURS = ["--systems", "vllm-dllm"]
SMALL_FP8 = [*SMALL, "--scheme", "fp8-dynamic", *ONLY_OURS]
FP8_CELLS = "1x128 8x128 16x128 32x128 1x1024"
"""Also of a second start: vLLM keeps what it compiles by the most requests and the longest."""
ATTENTION = ["--contexts", "128", "1024", "8192", "65536", "--batches", "1", "2", "4", "8"]
MEASURED = json.dumps({"additional_config": {"vllm_dllm": {"kernel_choice": "measured"}}})


@dataclass(frozen=True)
class Stage:
    name: str
    shows: str
    command: list[str]  # behind `python -m`
    small: list[str]  # for a rehearsal on a CPU
    seconds: int  # it takes so long after the stage before, as far as anybody knows
    limit: int  # seconds, from when its turn comes; then it is ended
    early: int = 0
    """Seconds that its engines take to start, beside those of other stages: they do so from the
    first stage on, and wait for their turn to measure."""
    needs: list[str] = field(default_factory=list)  # archives of the bundle
    with_next: bool = False  # the next stage starts with this one
    settings: dict[str, str] = field(default_factory=dict)  # environment variables


def full_shape(scheme: str, cells: str, trace: str, *more: str) -> list[str]:
    wanted = ["--cells", *cells.split(), "--trace", *trace.split()]
    return [*PAIR, "--scheme", scheme, *wanted, *more]


STAGES = [
    Stage(
        "vocabulary",
        "the pass over the LM head's output with 1, 2 and 4 warps",
        ["bench.lease.vocabulary"],
        ["bench.lease.vocabulary"],
        seconds=15,
        limit=40,
    ),
    Stage(
        "fp8",
        "ours and stock vLLM in FP8, 1 to 32 requests, timelines",
        full_shape(
            "fp8-dynamic",
            FP8_CELLS,
            "1x128 16x128",
            *("--kv-cache-gib", "9", "--start-by", "330"),
        ),
        [*SMALL_FP8, "--trace", "1x128"],
        seconds=60,
        limit=200,
        early=236,
        needs=["dsl"],
    ),
    Stage(
        "serve",
        "`vllm serve` and `vllm bench serve` at 1 and 16 requests: random, 1,024 tokens in, 1,024 "
        "out, FP8, 16 fixed steps",
        ["bench.lease.serve", "--start-by", "330"],
        ["bench.lease.serve", "--shape", "small", "--tokens", "256", "--concurrency", "1", "2"],
        seconds=65,
        limit=100,
        early=236,
        needs=["dsl"],
    ),
    Stage(
        "one-step",
        "one step at the 26B model's widths, a layer of each kind, bf16, prompts to 65,536 tokens, "
        "against transformers on the same GPU",
        ["pytest", "-q", "-s", "-m", "thorough", "tests/engine/test_full_width.py"],
        ["pytest", "-q", "-m", "", "tests/engine/test_one_step.py", "-k", "plain"],
        seconds=60,
        limit=150,
        with_next=True,
    ),
    Stage(
        "kernels",
        "tests of all kernels, against float64 and their definitions",
        ["bench.lease.kernel_tests", *KERNELS],
        ["bench.lease.kernel_tests", "tests/unit/step/test_settle_triton.py", "--at-once", "2"],
        seconds=80,
        limit=240,
        with_next=True,
    ),
    Stage(
        "shipped",
        "the shipped checkpoints answer: images, a drafter, masked, grammars, NVFP4",
        ["bench.lease.shipped"],
        ["bench.lease.shipped", "--rows", "4"],
        seconds=50,
        limit=240,
    ),
    Stage(
        "fp8-again",
        "ours in FP8 with what an earlier start has left in vLLM's caches, and FlashAttention-4 "
        "compiled in another process",
        full_shape(
            "fp8-dynamic",
            FP8_CELLS,
            "1x128",
            *(*ONLY_OURS, "--kv-cache-gib", "9", "--start-by", "110"),
        ),
        SMALL_FP8,
        seconds=85,
        limit=140,
        needs=["dsl"],
        settings={"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"},
    ),
    Stage(
        "bf16",
        "ours and stock vLLM in bf16, one request",
        full_shape(
            "bf16",
            "1x128",
            "1x128",
            *("--kv-cache-gib", "3", "--start-by", "185"),
        ),
        [*SMALL, "--scheme", "bf16"],
        seconds=175,
        limit=205,
        needs=["dsl"],
    ),
]
MORE = [  # that run if they are asked for by name
    Stage(
        "fp8-ours",
        "ours alone in FP8, where stock's steps are known",
        full_shape(
            "fp8-dynamic",
            "1x128 8x128 16x128 32x128 1x1024 1x8192 1x32768",
            "1x128 16x128 1x1024",
            *(*ONLY_OURS, "--kv-cache-gib", "9", "--start-by", "250"),
        ),
        SMALL_FP8,
        seconds=45,
        limit=100,
        early=150,
        needs=["dsl"],
    ),
    Stage(
        "fp8-long",
        "ours and stock vLLM in FP8 behind long prompts",
        full_shape(
            "fp8-dynamic",
            "1x8192 1x32768",
            "1x32768",
            *("--kv-cache-gib", "9", "--start-by", "250"),
        ),
        [*SMALL_FP8],
        seconds=40,
        limit=100,
        early=170,
        needs=["dsl"],
    ),
    Stage(
        "bf16-ours",
        "ours alone in bf16, one request",
        full_shape(
            "bf16",
            "1x128",
            "1x128",
            *(*ONLY_OURS, "--kv-cache-gib", "3", "--start-by", "150"),
        ),
        [*SMALL, "--scheme", "bf16", *ONLY_OURS],
        seconds=125,
        limit=160,
        needs=["dsl"],
    ),
    *(
        Stage(
            scheme,
            f"ours in {scheme.upper()}, by Marlin{note}",
            full_shape(
                scheme,
                "1x128 8x128",
                "1x128",
                *(*ONLY_OURS, "--kv-cache-gib", "4", "--start-by", "250"),
            ),
            [*SMALL, "--scheme", scheme, *ONLY_OURS],
            seconds=15,
            limit=60,
            early=150,
            needs=["dsl"],
        )
        for scheme, note in (
            ("nvfp4", ": what vLLM prefers on Hopper, HUMMING, needs nvcc"),
            ("w4a16", " as well"),
        )
    ),
    Stage(
        "fp8-measured",
        "ours in FP8, which times its kernels first (`kernel_choice`)",
        full_shape(
            "fp8-dynamic",
            "1x128 8x128 16x128 32x128 1x1024 1x8192 1x32768",
            "1x128 16x128",
            *(*ONLY_OURS, "--kv-cache-gib", "9", "--start-by", "170"),
            *("--options", MEASURED),
        ),
        [*SMALL_FP8, "--options", MEASURED],
        seconds=110,
        limit=190,
        needs=["dsl"],
    ),
    Stage(
        "attention",
        "our Triton, our FlashAttention-4, vLLM's FlashAttention-4, alone",
        ["bench.attention", "--without", "flex_attention", "--rounds", "3", *ATTENTION],
        ["bench.lease.gpu_only", "bench.attention"],
        seconds=75,
        limit=110,
        needs=["dsl"],
    ),
    Stage(
        "experts",
        "a layer's experts, routed evenly: ours, CUTLASS FP8, Triton's default and our tiles, "
        "in FP8 and bf16",
        ["bench.lease.experts"],
        ["bench.lease.experts"],
        seconds=40,
        limit=80,
    ),
    Stage(
        "linears",
        "dense products of a step: FP8 by CUTLASS, PyTorch and Triton, and bf16",
        ["bench.lease.linears"],
        ["bench.lease.linears"],
        seconds=15,
        limit=40,
    ),
]
