"""What engines do in the processes of `process.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cuda_build import checkpoints
from tests.cuda_build.device import GpuDevice
from tests.cuda_build.engine import Engine, Report
from tests.paths import CHECKPOINTS

Requests = Mapping[str, Mapping[str, Any]]
"""By name: `prompt`, a number of tokens or what vLLM takes, and vLLM's sampling parameters."""


def serve(
    device: GpuDevice,
    folder: Path,
    scheme: str,
    requests: Requests,
    options: Mapping[str, Any],
) -> Report:
    """The 26B model's shape answers `requests`, which come one after the other, a step apart."""
    engine = Engine(device, checkpoints.dummy(folder, scheme), **options)
    return answer(engine, requests)


def answer(engine: Engine, requests: Requests) -> Report:
    for name, request in requests.items():
        params = dict(request)
        prompt = params.pop("prompt")
        if isinstance(prompt, int):
            prompt = {"prompt_token_ids": list(range(20, 20 + prompt))}
        engine.ask(name, prompt, **params)
        engine.step()
    engine.run()
    return engine.report(**describe(engine))


def describe(engine: Engine) -> dict[str, Any]:
    """What vLLM chose."""
    config = engine.config
    groups = engine.runner.attn_groups
    return {
        "graphs": config.compilation_config.cudagraph_mode.name,
        "async": config.scheduler_config.async_scheduling,
        "attention": sorted({group.backend.get_name() for row in groups for group in row}),
        "cache": str(next(iter(engine.runner.kv_caches)).dtype),
        "kernels": sorted({type(m).__name__ for m in _quant_methods(engine.runner.model)}),
        "waits at start": len(engine.at_start),
    }


def _quant_methods(model: Any) -> list[Any]:
    return [
        method
        for module in model.modules()
        if (method := getattr(module, "quant_method", None)) is not None
    ]


def serve_kinds(
    device: GpuDevice, folder: Path, kinds: Mapping[str, Mapping[str, Any]], ahead: bool
) -> dict[str, Report]:
    """Each kind of request in turn beside a plain one, then all at once, in one engine."""
    engine = Engine(
        device,
        checkpoints.dummy(folder, "bf16"),
        compilation_config={"mode": 0, "cudagraph_mode": "FULL"},
        max_num_batched_tokens=2048,
        max_num_seqs=len(kinds) + 2,
        async_scheduling=ahead,
        additional_config={"vllm_dllm": {"load_stages": [{"canvases": 2}]}},
    )
    found = {}
    for kind, params in kinds.items():
        for log in (device.waits, device.forbidden):
            log.clear()
        requests = {"plain": {"prompt": 12}, kind: {"prompt": 30, **params}}
        found[kind] = answer(engine, requests)
    for log in (device.waits, device.forbidden):
        log.clear()
    found["all at once"] = answer(
        engine, {kind: {"prompt": 30, **params} for kind, params in kinds.items()}
    )
    return found


def draft(
    device: GpuDevice,
    drafter: Mapping[str, Any],
    requests: Requests,
    options: Mapping[str, Any],
) -> Report:
    """The shipped target with its drafter. Facts: the addresses of the caches that the drafter's
    context is written to, and of those that its layers read."""
    import gc

    allocated: list[tuple[int, ...]] = []
    settings = dict(drafter)
    if settings.get("width_policy") == "blockpilot":
        settings["predictor"] = str(CHECKPOINTS / "qwen3-tiny-blockpilot")
    speculative = {
        "method": "dflash",
        "model": str(CHECKPOINTS / "qwen3-tiny-dflash"),
        "num_speculative_tokens": 15,
    }
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    initialize = GPUModelRunner.initialize_kv_cache

    def initialize_and_note(runner: Any, *args: Any, **kwargs: Any) -> None:
        initialize(runner, *args, **kwargs)
        allocated.append(tuple(cache.data_ptr() for cache in runner.kv_caches))

    GPUModelRunner.initialize_kv_cache = initialize_and_note
    engine = Engine(
        device,
        CHECKPOINTS / "qwen3-tiny-target",
        dtype="bfloat16",
        max_model_len=1024,
        speculative_config=speculative,
        additional_config={"vllm_dllm": {"drafter": settings}},
        compilation_config={"mode": 0, "cudagraph_mode": "FULL"},
        **options,
    )
    gc.collect()
    report = answer(engine, requests)
    model = engine.runner.speculator.model.model
    report.facts |= {
        "caches": len(set(allocated)),
        "caches written": model._addresses,
        "caches of layers": model.cache_addresses(),
    }
    return report
