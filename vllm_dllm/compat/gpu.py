"""What vLLM's copy of NVML knows of the machine."""

from vllm.utils.import_utils import import_pynvml


def driver_version() -> str:
    """Of NVIDIA's driver; "" where there is none. Initializes no CUDA context."""
    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()
