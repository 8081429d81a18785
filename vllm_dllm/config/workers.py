"""The worker classes of diffusion models, named by string: importing one loads the model runner."""

GPU_WORKER = "vllm_dllm.step.worker.CanvasWorker"
CPU_WORKER = "vllm_dllm.cpu.worker.TritonFreeCPUWorker"

PREFILL_EMITTED_TOKENS = (GPU_WORKER, CPU_WORKER)
"""Those that take a finished block for a part of its request's prefill."""
