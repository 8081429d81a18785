"""The worker of diffusion models on GPUs, and which kernels its layers run."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.gpu_worker import Worker

from vllm_dllm.attention import measure as attention
from vllm_dllm.attention.ahead import Compiler, compile_ahead
from vllm_dllm.attention.gpu import GpuCanvasImpl
from vllm_dllm.attention.warm_up import compile_attention
from vllm_dllm.compat import runner
from vllm_dllm.compat.ending import leave_signals_to_engine
from vllm_dllm.compat.experts import clear_tiles_cache
from vllm_dllm.compat.prompt_logprobs import compile_prompt_logprobs, restrict_prompt_logprobs
from vllm_dllm.compat.step_inputs import reuse_step_inputs
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.tiles import VARIABLE, may_replace_experts, shipped_block_sizes, shipped_tiles
from vllm_dllm.measured import expert_kernels, folder, tiles
from vllm_dllm.measured.stopwatch import Clock, Stopwatch, gpu_clock
from vllm_dllm.parents import end_with_parent
from vllm_dllm.quantization.complete_weights import weights_in_parts

logger = init_logger(__name__)

MOST_SECONDS = 15.0  # of all measurements
CANVASES = (1, 8, 32)  # how many canvases the timed steps have


def choose_kernels(
    vllm_config: VllmConfig, model: torch.nn.Module, clock: Clock = gpu_clock
) -> None:
    """Makes layers run the kernels that the setting `kernel_choice` asks for: those that were
    fastest on such a GPU, or those that are on this one, timed once for all starts. Must be called
    when the KV cache exists, before graphs are captured.

    - "shipped": experts run our kernel where `block_sizes.json` says so, unless the user chose
      otherwise (`may_replace_experts`).
    - "measured": the first rank times kernels, unless an earlier start stored its measurements, and
      all ranks use its measurements. Kernels that it had no time for stay as shipped.
    - "stock", and any value under `VLLM_BATCH_INVARIANT`: nothing changes.
    """
    extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
    if extension.kernel_choice == "stock" or envs.VLLM_BATCH_INVARIANT:
        return
    if extension.kernel_choice == "shipped":
        _install_experts(vllm_config, model, may_replace_experts(vllm_config), {}, [])
        return
    path, ranks = folder.result_folder(vllm_config), get_tp_group()
    stored = result = folder.read_result(path)
    if ranks.is_first_rank and stored is None:
        result = _measure(vllm_config, model, path, clock)
    result = ranks.broadcast_object(result)
    measured = result["ours"]
    if result != stored:  # else layers have read it
        if _store(result, path):
            with set_current_vllm_config(vllm_config):
                for layer in _layers(vllm_config):
                    if isinstance(getattr(layer, "impl", None), GpuCanvasImpl):
                        layer.impl.choose_version()
        else:
            measured = {}
    as_shipped = may_replace_experts(vllm_config, path)
    _install_experts(vllm_config, model, as_shipped, measured, result["rows"])


def _install_experts(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    as_shipped: bool,
    measured: expert_kernels.SizesOf,
    rows: list[int],
) -> None:
    """Makes experts run our kernel where it was faster on this GPU, by `measured`. Numbers of rows
    that are missing there run as `block_sizes.json` says if `as_shipped`. What is missing there,
    too, runs vLLM's kernel. `rows`: all that were to be measured."""
    sizes = dict(shipped_block_sizes()) if as_shipped else {}
    for file, fastest in measured.items():
        sizes[file] = (sizes.get(file) or {str(number): 0 for number in rows}) | fastest
    if sizes:
        with set_current_vllm_config(vllm_config):
            expert_kernels.install_kernels(model.modules(), sizes)


def _store(result: dict[str, Any], path: Path) -> bool:
    """Writes the measurements `result` where attention and vLLM look for them, and returns True. If
    they cannot be written, logs a warning and returns False."""
    try:
        for file, table in result["tiles"].items():
            folder.write_json(path, file, shipped_tiles(file) | table)
        folder.write_json(path, folder.RESULT, result)
    except OSError as error:
        logger.warning("Cannot keep what was measured in %s: %s. It is not used.", path, error)
        return False
    clear_tiles_cache()
    return True


def _measure(
    vllm_config: VllmConfig, model: torch.nn.Module, path: Path, clock: Clock
) -> dict[str, Any]:
    """Times attention and experts for about `MOST_SECONDS` at most. Returns the JSON of
    `measured.json`: `gpu` and `layers` for `Times.from_json`, `rows` that were to be timed, `tiles`
    and `ours` as in `FastestExperts`."""
    assert vllm_config.diffusion_config is not None
    started = time.monotonic()
    stopwatch = Stopwatch(clock, started + MOST_SECONDS)
    length = vllm_config.diffusion_config.canvas_length
    most = vllm_config.scheduler_config.max_num_batched_tokens
    steps = [canvases for canvases in CANVASES if canvases * length <= most]
    rows = [canvases * length for canvases in steps]
    layers: list[dict[str, Any]] = []
    tables: dict[str, tiles.Table] = {}
    ours: dict[str, expert_kernels.Sizes] = {}
    gains: list[str] = []
    # Masked models run Triton alone, and `flash_attn_version` is the user's choice.
    is_masked = vllm_config.model_config.architecture in FAMILIES
    if not is_masked and vllm_config.attention_config.flash_attn_version is None:
        with set_current_vllm_config(vllm_config):
            layers = attention.measure_attention(
                _layers(vllm_config),
                vllm_config.model_config.dtype,
                length,
                steps,
                vllm_config.model_config.max_model_len,
                stopwatch,
            )
    if os.environ.get(VARIABLE) == str(path):  # else vLLM reads tiles from the user's folder
        tables, ours, gains = tiles.measure_experts(model.modules(), rows, stopwatch)
    logger.info(
        "Kernels were timed in %.1f s%s: %s; %s.",
        time.monotonic() - started,
        ", not all of them" if stopwatch.is_over else "",
        "; ".join(attention.describe_gains(layers)) or "attention not compared",
        "; ".join(gains) or "experts unchanged",
    )
    gpu = current_platform.get_device_name()
    return {"gpu": gpu, "layers": layers, "rows": rows, "tiles": tables, "ours": ours}


def _layers(vllm_config: VllmConfig) -> list[Any]:
    """Returns all layers that vLLM has registered, among them attention layers."""
    return list(vllm_config.compilation_config.static_forward_context.values())


WARMED_UP = (
    SamplingParams(),
    SamplingParams(top_k=50),
    SamplingParams(top_p=0.9),
    SamplingParams(logprobs=5),
)
"""Parameters of requests whose steps run different kernels. vLLM warms up with one request that
asks for everything, and our sampler computes less for requests that ask for less."""


class CanvasWorker(Worker):
    """Adds to vLLM's GPU worker: measured kernels, canvases committed beside successors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        self._compiler: Compiler | None = None
        super().__init__(*args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model, starts to compile attention, and restricts prompt log-probabilities to
        rows of prompts."""
        super().load_model(**kwargs)
        self._compiler = compile_ahead(
            self.vllm_config,
            self.vllm_config.compilation_config.static_forward_context.values(),
            has_images=self.model_runner.supports_mm_inputs,
        )
        if self._compiler is not None:
            runner.call_before_graphs(self.model_runner, self._compiler.wait)
        restrict_prompt_logprobs(self.model_runner)
        reuse_step_inputs(self.model_runner)
        state = self.model_runner.model_state
        state.forward_output = partial(runner.captured_forward_output, self.model_runner)

    def determine_available_memory(self) -> int:
        """Returns the bytes that are free for the KV cache. Drops the step's graphs, which vLLM
        captured to measure their memory. vLLM 0.33 also adds a request with every option to each
        slot, and leaves it there: such a one would hold 2.5 MiB of a large vocabulary."""
        with self.model_runner.sampler.replace_params(SamplingParams()):
            available: int = super().determine_available_memory()
        self.model_runner.model_state.drop_graphs()  # vLLM has captured to see how much they take
        return available

    def compile_or_warm_up_model(self) -> Any:
        """Measures, compiles and warms up kernels. Has vLLM capture graphs; returns its result."""
        if self._compiler is not None:
            self._compiler.wait()
        # Before graphs are captured: what they read must not be allocated anew, and they keep the
        # kernels of their capture.
        choose_kernels(self.vllm_config, self.model_runner.model)
        if self.vllm_config.kernel_config.enable_jit_warmup:
            begin = time.monotonic()
            compile_attention(
                self.vllm_config.compilation_config.static_forward_context.values(),
                self.model_config.dtype,
                self.scheduler_config.max_num_batched_tokens,
                self.model_config.max_model_len,
                has_images=self.model_runner.supports_mm_inputs,
            )
            for params in WARMED_UP:
                with self.model_runner.sampler.replace_params(params):
                    warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
            compile_prompt_logprobs(self.model_runner)
            seconds = time.monotonic() - begin
            logger.info("Kernels were compiled and warmed up in %.0f s.", seconds)
        done = super().compile_or_warm_up_model()
        leave_signals_to_engine()
        return done

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads weights of a trainer, which come in parts."""
        with weights_in_parts():
            super().update_weights(*args, **kwargs)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Executes the model, with finished blocks committed beside their successors."""
        runner.join_commits(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples without vLLM's grammar masks: ours are `step/asked/grammars.py`, and vLLM's
        warm-up has masks for rows that a seeded model does not have."""
        return runner.attach_canvas_numbers(self.model_runner, super().sample_tokens(None))
