"""vLLM's platform of CPUs, for Ray: vLLM itself does not let Ray place workers on CPUs, so Ray is
told that this machine's cores are GPUs."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"


def platform() -> str:
    return "ray_cpus.RayCpuPlatform"
