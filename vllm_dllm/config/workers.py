"""Classes of workers, schedulers and speculators, by name: importing one loads the model runner."""

from collections.abc import Mapping

GPU_WORKER = "vllm_dllm.step.runner.worker.CanvasWorker"
CPU_WORKER = "vllm_dllm.cpu.worker.TritonFreeCPUWorker"

STOCK_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
DRAFT_WORKER = "vllm_dllm.drafters.worker.DraftWorker"
DRAFT_SCHEDULER = "vllm_dllm.drafters.scheduler.make_scheduler"
SPECULATORS = (
    "vllm_dllm.drafters.dflash.WidthDFlashSpeculator",
    "vllm_dllm.drafters.dflash.CheckedDFlash2Speculator",
)
"""Speculator classes for a DFlash drafter and for a DFlash2 drafter."""

JOIN_COMMITS = (GPU_WORKER, CPU_WORKER)
"""Workers that compute a finished block as part of its request's prefill."""

CPU_IMPORTS = (
    "vllm_dllm.plugin",
    "vllm_dllm.cpu.worker",
    "vllm_dllm.scheduling.scheduler",
    "vllm_dllm.models.diffusion_gemma",
)
"""Our modules that the processes of an engine on a CPU import."""

SHORT_SPINS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "300us"}
"""Limits of spinning, in GNU's OpenMP (a count, some 0.3 ms) and in Intel's."""


def cpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to `environment`, that of an engine on a CPU. Limits how long
    OpenMP's threads spin, unless `environment` sets that in some way."""
    variables = {
        # A worker that compiles does not answer for minutes, and after one minute vLLM would warn
        # that processes hang. A worker that hangs while it serves is reported after 300 s.
        "VLLM_RINGBUFFER_WARNING_INTERVAL": "600"
    }
    # OpenMP threads that spin while they wait hold cores that other threads need: next to another
    # busy process on two cores, a denoise step took 200 ms instead of 12. Threads that sleep at
    # once have to be woken for each operation, which took 0.2 to 0.6 ms on a virtual machine. So
    # they spin for about the time between two operations.
    if not {"OMP_WAIT_POLICY", *SHORT_SPINS} & environment.keys():
        variables |= SHORT_SPINS
    return {name: value for name, value in variables.items() if name not in environment}
