"""Engines of the 26B model's shape start and answer: on each kind of GPU, with each format of
weights and of the cache, with and without CUDA graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import chores
from tests.cuda_build.engine import Report
from tests.cuda_build.machine import A100, B200, H100, H200, RTX, Host

PLAIN = {
    "short": {"prompt": 5, "max_tokens": 20},
    "two canvases": {"prompt": 40, "max_tokens": 400},
    "a prompt in parts": {"prompt": 3000, "max_tokens": 20},
}
OURS = "CUSTOM"
IN_PARTS = Host((9, 0), settings=(("VLLM_USE_BREAKABLE_CUDAGRAPH", "1"),))
"""Without a compiler, steps are captured in parts in this way alone."""
KEEPING = Host((9, 0), settings=(("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1"),))
TRITON_EXPERTS = {"moe_backend": "triton"}  # vLLM's choice would compile CUDA
CUTLASS = {"moe_backend": "cutlass", "linear_backend": "cutlass"}  # as would FlashInfer
MARLIN = {"moe_backend": "marlin", "linear_backend": "marlin"}  # as would HUMMING


@dataclass(frozen=True)
class Case:
    """`graphs`: vLLM's name of what is captured. `attention`: the backend that is to be chosen."""

    host: Host = H100
    scheme: str = "bf16"
    graphs: str = "FULL"
    attention: str = OURS
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "an H100, bf16": Case(),
    "an H100 that keeps FlashAttention-4": Case(host=KEEPING),
    "an A100, bf16": Case(host=A100),
    "a B200, bf16": Case(host=B200, options=TRITON_EXPERTS),
    "an RTX PRO 6000, bf16": Case(host=RTX, options=TRITON_EXPERTS),
    "an H100, without graphs": Case(graphs="NONE"),
    "an H100, steps in parts": Case(host=IN_PARTS, graphs="FULL_AND_PIECEWISE"),
    "two H100s, bf16": Case(host=Host((9, 0), num_gpus=2), options={"tensor_parallel_size": 2}),
    "an H100, FlashAttention-4 alone": Case(
        options={"attention_config": {"flash_attn_version": 4}}
    ),
    "an H100, bf16, cache fp8": Case(options={"kv_cache_dtype": "fp8"}),
    "an H100, FP8": Case(scheme="fp8-dynamic"),
    "an H200, FP8": Case(host=H200, scheme="fp8-dynamic"),
    "a B200, FP8": Case(host=B200, scheme="fp8-dynamic"),
    "a B200, NVFP4": Case(host=B200, scheme="nvfp4", options=CUTLASS),
    "an H100, NVFP4": Case(scheme="nvfp4", options=MARLIN),
    "an H100, W4A16": Case(scheme="w4a16", options=MARLIN),
}


@pytest.mark.parametrize(
    ("scheme", "backend"),
    [("bf16", "triton"), ("fp8-dynamic", "triton"), ("fp8-dynamic", "cutlass")],
)
def test_other_kernels_of_experts_can_be_tried(
    on_host: Callable[..., dict[str, Any]], folder: Path, scheme: str, backend: str
) -> None:
    """What `kernel_choice` times, in the layers that vLLM has built."""
    found = on_host(H100, chores.try_tiles, folder=folder, scheme=scheme, backend=backend, rows=512)
    (file,) = found["files"]
    assert ("dtype=fp8_w8a8" in file) == (scheme != "bf16")
    assert file.startswith("E=128,N=704,device_name=")
    assert found["layers"] > 0 and set(found["shapes"]) == {(512, 2816)}
    assert found["problems"] == [], "not in a CUDA graph"
    assert found["size"] == 64 and found["ours"] >= 3, "two products and a sum"
    assert (len(found["shapes"]) > 1) == (backend == "triton"), "CUTLASS has no tiles to choose"
    assert found["compiled"] >= len(found["shapes"]) + 2, "each is a kernel of its own"
    assert found["made anew"] == (scheme != "bf16")
    assert {"_gate_up_kernel", "_down_kernel"} <= set(found["run again"]), "as before a reload"


def test_other_kernels_of_fp8_linears_can_be_tried(
    on_host: Callable[..., dict[str, Any]], folder: Path
) -> None:
    found = on_host(H200, chores.try_linears, folder=folder, rows=512)
    assert found["layers"] > 0
    for shape, made in found["shapes"].items():
        outputs = int(shape.partition("x")[2])
        assert made == dict.fromkeys(("CUTLASS", "PyTorch", "Triton"), (512, outputs))
    assert found["tokens"] == {"short": 20} and found["waits"] == []
    assert found["products"] > 0


@pytest.mark.parametrize("name", CASES)
def test_it_starts_and_answers(on_host: Callable[..., Report], folder: Path, name: str) -> None:
    case = CASES[name]
    options: dict[str, Any] = {
        "compilation_config": {"mode": 0, "cudagraph_mode": case.graphs},  # no compiler
        "max_num_batched_tokens": 2048,
        **case.options,
    }
    report = on_host(
        case.host, chores.serve, folder=folder, scheme=case.scheme, requests=PLAIN, options=options
    )
    require_no_waits(report)
    assert report.facts["graphs"] == case.graphs
    assert report.facts["attention"] == [case.attention]
    on_hopper = case.host.capability == (9, 0) and case.options.get("kv_cache_dtype") != "fp8"
    assert ("FlashAttention-4" in report.kernels) == on_hopper
    if case.host == KEEPING:
        assert report.facts["compiled by CuTe"] == 0, "another process has, beside the start"
    if case.graphs != "NONE":  # or vLLM warms up few sizes of steps
        assert report.compiled_late == [], "requests wait for a compiler"
    assert (report.graphs > 0) == (report.replays > 0) == (case.graphs != "NONE")
    assert report.tokens == {"short": 20, "two canvases": 400, "a prompt in parts": 20}
    assert report.facts["experts beside"] == (case.host.num_gpus == 1)
    of_h200 = {"_gate_up_kernel", "_down_kernel", "_quantise_rows_kernel"}
    assert (of_h200 <= set(report.kernels)) == (case.host == H200)


def require_no_waits(report: Report) -> None:
    assert report.waits == [], "the host waits for the device"
    assert report.forbidden == [], "not in a CUDA graph"
    assert report.copies > 0
