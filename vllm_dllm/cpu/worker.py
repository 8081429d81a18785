"""The CPU worker of model runner v2. Configurations name it by string, so that the process that
runs the model, which is not the one that was started by the user, is the one that imports it."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dllm.cpu.launch import replace_kernels


class TritonFreeCPUWorker(CPUWorker):
    def init_device(self) -> None:
        replace_kernels()
        super().init_device()
