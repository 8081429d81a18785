"""What vLLM's copy of NVML knows of the machine."""

from vllm.utils.import_utils import import_pynvml


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, or "" where there is none. Initializes no CUDA
    context."""
    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()
