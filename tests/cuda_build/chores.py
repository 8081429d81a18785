"""What engines do in the processes of `process.py`."""

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from tests.cuda_build import checkpoints, sleeping
from tests.cuda_build.device import GpuDevice, storage_of
from tests.cuda_build.engine import Engine, Report
from tests.paths import CHECKPOINTS

Requests = Mapping[str, Mapping[str, Any]]
"""By name: `prompt`, a number of tokens or what vLLM takes, and vLLM's sampling parameters."""


def serve(
    device: GpuDevice, folder: Path, scheme: str, requests: Requests, options: Mapping[str, Any]
) -> Report:
    """The 26B model's shape answers `requests`, which come one after the other, a step apart."""
    return serve_checkpoint(device, checkpoints.dummy(folder, scheme), requests, options)


def serve_checkpoint(
    device: GpuDevice, checkpoint: Path, requests: Requests, options: Mapping[str, Any]
) -> Report:
    return answer(Engine(device, checkpoint, **options), requests)


def serve_masked(
    device: GpuDevice,
    folder: Path,
    architecture: str,
    requests: Requests,
    options: Mapping[str, Any],
) -> Report:
    """A random model of few small layers."""
    made = checkpoints.masked(folder, architecture)
    return serve_checkpoint(device, made, requests, options)


def serve_adapters(
    device: GpuDevice,
    folder: Path,
    architecture: str,
    layers: list[str],
    requests: Requests,
    options: Mapping[str, Any],
) -> Report:
    """Each request with every second of two adapters, and without one."""
    made, adapters = checkpoints.adapted(folder, architecture, layers)
    asked = {
        f"{name}, {'plain' if adapter is None else adapter.name}": {**request, "adapter": adapter}
        for name, request in requests.items()
        for adapter in (None, *adapters)
    }
    options = {**options, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = Engine(device, made, **options)
    engine.load(adapters)
    return answer(engine, asked)


def serve_around_sleep(
    device: GpuDevice, checkpoint: Path, level: int, requests: Requests, options: Mapping[str, Any]
) -> dict[str, Report]:
    """`requests` before and after a sleep. After one of level 2 the model's parameters count as
    written: that is what vLLM's `reload_weights` loads, for which parameters without memory lack
    what loads them."""
    sleeping.install(device)
    engine = Engine(device, checkpoint, enable_sleep_mode=True, **options)
    found = {"before": answer(engine, requests)}
    with device:
        engine.llm.sleep(level)
        engine.llm.wake_up(["weights"])
        reloaded = engine.runner.model.parameters() if level == 2 else ()
        engine.llm.wake_up(["kv_cache"])
    for memory in (*reloaded, *engine.runner.kv_caches):  # nobody expects caches to be kept
        device.lost.pop(storage_of(memory), None)
    for log in (device.waits, device.forbidden):
        log.clear()
    found["after"] = answer(engine, requests)
    return found


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
    """What vLLM and this project chose."""
    from vllm_dllm.compat.concurrent_experts import ConcurrentLayer

    config = engine.config
    groups = engine.runner.attn_groups
    return {
        "graphs": config.compilation_config.cudagraph_mode.name,
        "async": config.scheduler_config.async_scheduling,
        "attention": sorted({group.backend.get_name() for row in groups for group in row}),
        "cache": str(next(iter(engine.runner.kv_caches)).dtype),
        "kernels": sorted(set(_kernels(engine.runner.model))),
        "waits at start": len(engine.at_start),
        "experts beside": any(type(m) is ConcurrentLayer for m in engine.runner.model.modules()),
        "compiled by CuTe": engine.device.compiled_by_cute,
    }


def _kernels(model: Any) -> Iterator[str]:
    """That vLLM chose for products with weights, where it has a choice."""
    for module in model.modules():
        for owner in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
            for name, value in getattr(owner, "__dict__", {}).items():
                if name.endswith("_backend") and isinstance(value, Enum):
                    yield str(value.value)
                elif name in ("fp8_linear", "kernel"):
                    yield type(value).__name__


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
        for log in (device.waits, device.forbidden, device.compiled):
            log.clear()
        requests = {"plain": {"prompt": 12}, kind: {"prompt": 30, **params}}
        found[kind] = answer(engine, requests)
    for log in (device.waits, device.forbidden):
        log.clear()
    found["all at once"] = answer(
        engine, {kind: {"prompt": 30, **params} for kind, params in kinds.items()}
    )
    return found


def try_tiles(
    device: GpuDevice, folder: Path, scheme: str, backend: str, rows: int
) -> dict[str, Any]:
    """A server's choice of what computes its experts, as far as nothing is computed: the files that
    vLLM looks for, the shape of what a layer makes with other tiles and by our kernel, kernels
    compiled, and kernels that run when its weights were loaded again."""
    from vllm_dllm.compat import experts
    from vllm_dllm.config.tiles import all_shipped_tiles
    from vllm_dllm.measured import expert_kernels

    engine = Engine(
        device,
        checkpoints.dummy(folder, scheme),
        compilation_config={"mode": 0, "cudagraph_mode": "NONE"},
        moe_backend=backend,
    )
    layers = list(experts.find_expert_layers(engine.runner.model.modules()))
    found: dict[str, Any] = {"files": sorted({experts.tiles_file_name(layer) for layer in layers})}
    with device:
        layer = layers[0]
        states = torch.zeros(rows, layer.hidden_size, device="cuda", dtype=layer.params_dtype)
        size = expert_kernels.block_size(layer, rows)
        before = len(device.compiled)
        shapes = [expert_kernels.run_layer(layer, size, states).shape]
        ours = len(device.compiled) - before
        for log in (device.waits, device.forbidden):
            log.clear()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # as they are timed
            expert_kernels.run_layer(layer, size, states)
            experts.run_with_tiles(layer, None, states)
        problems = [*device.waits, *device.forbidden]
        if experts.has_tunable_tiles(layer):
            assert experts.tiles_in_use(layer, rows)["BLOCK_SIZE_M"] > 0
            shapes += [
                experts.run_with_tiles(layer, tiles, states).shape for tiles in all_shipped_tiles()
            ]
        expert_kernels.install_kernels(layers, {found["files"][0]: {str(rows): size}})
        compiled, before_reload = len(device.compiled) - before, layer.quant_method.moe_kernel
        layer.quant_method.process_weights_after_loading(layer)
        device.kernels.clear()
        experts.run_with_tiles(layer, None, states)
    return found | {
        "made anew": layer.quant_method.moe_kernel is not before_reload,
        "run again": sorted(device.kernels),
        "layers": len(layers),
        "shapes": [tuple(shape) for shape in shapes],
        "size": size,
        "ours": ours,
        "problems": problems,
        "compiled": compiled,
    }


def try_linears(device: GpuDevice, folder: Path, rows: int) -> dict[str, Any]:
    """A server that chooses the kernels of its FP8 linears, as far as nothing is computed: for each
    shape of a weight, the shape of what each candidate makes; what a CUDA graph forbids; a
    request's answer, with a candidate for each shape; and kernels of Triton that ran for it."""
    from vllm_dllm.compat.fp8_linears import Product, opened_fp8_linears
    from vllm_dllm.measured import fp8_linears
    from vllm_dllm.step.runner import worker

    worker.choose_kernels = lambda *_: None  # what it times is below
    engine = Engine(
        device,
        checkpoints.dummy(folder, "fp8-dynamic"),
        compilation_config={"mode": 0, "cudagraph_mode": "NONE"},
        moe_backend="triton",
        additional_config={"vllm_dllm": {"kernel_choice": "measured"}},
    )
    layers = {
        fp8_linears.shape_name(each.weight): each
        for each in opened_fp8_linears(engine.runner.model.modules())
    }
    shapes = {}
    for shape, layer in layers.items():
        with device:
            states = torch.zeros(rows, layer.weight.shape[0], device="cuda").to(fp8_linears.FP8)
            scale = torch.ones(rows, 1, device="cuda")
            product = Product(states, scale, layer.weight, layer.weight_scale, None, torch.bfloat16)
            for multiply in fp8_linears.CANDIDATES.values():
                multiply(product)
            for log in (device.waits, device.forbidden):
                log.clear()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                shapes[shape] = {
                    name: tuple(multiply(product).shape)
                    for name, multiply in fp8_linears.CANDIDATES.items()
                }
            problems = [*device.waits, *device.forbidden]
            assert not problems, problems
    names = list(fp8_linears.CANDIDATES)
    fp8_linears.use_kernels(
        {shape: {str(rows): names[n % len(names)]} for n, shape in enumerate(layers)}
    )
    device.kernels.clear()
    report = answer(engine, {"short": {"prompt": 5, "max_tokens": 20}})
    return {
        "shapes": shapes,
        "layers": sum(1 for _ in opened_fp8_linears(engine.runner.model.modules())),
        "tokens": report.tokens,
        "waits": report.waits,
        "products": report.kernels.get("scaled_mm_kernel", 0),
    }


def draft(
    device: GpuDevice, drafter: Mapping[str, Any], requests: Requests, options: Mapping[str, Any]
) -> Report:
    """The shipped target with its drafter."""
    settings = dict(drafter)
    if settings.get("width_policy") == "blockpilot":
        settings["predictor"] = str(CHECKPOINTS / "qwen3-tiny-blockpilot")
    speculative = {
        "method": "dflash",
        "model": str(CHECKPOINTS / "qwen3-tiny-dflash"),
        "num_speculative_tokens": 15,
    }
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
    return answer(engine, requests)
