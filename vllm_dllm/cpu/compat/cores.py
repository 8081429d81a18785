"""Which cores vLLM gives its CPU workers."""

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.utils import torch_utils

from vllm_dllm.compat.patching import replace

available_cpu_count = torch_utils.available_cpu_count


def choose_cores(choose: Callable[[list[list[int]]], list[list[int]]], worker_cls: str) -> None:
    """This process' engine gives workers of `worker_cls` the cores that `choose` returns of those
    that vLLM could give each, the ids of its node's cores, where the user leaves the choice open.
    Repeatable."""

    def make(stock: Any) -> Any:
        class ChosenCores(stock):
            def __init__(self, config: VllmConfig) -> None:
                self.choice_is_ours = (
                    config.parallel_config.worker_cls == worker_cls
                    and envs.VLLM_CPU_NUM_OF_RESERVED_CPU is None
                    and config.kv_transfer_config is None  # vLLM reserves cores for its threads
                )
                super().__init__(config)

            def _get_autobind_cpu_ids(
                self, cpu_selector: Callable[..., Any]
            ) -> tuple[list[Any], list[Any]]:
                if not self.choice_is_ours:
                    found: tuple[list[Any], list[Any]] = super()._get_autobind_cpu_ids(cpu_selector)
                    return found
                self.reserve_cpu_num = 0
                by_worker, _ = super()._get_autobind_cpu_ids(cpu_selector)
                chosen = choose([[cpu.id for cpu in cpus] for cpus in by_worker])
                pairs = list(zip(by_worker, chosen, strict=True))
                left_out = [cpu for cpus, ids in pairs for cpu in cpus if cpu.id not in ids]
                self.reserve_cpu_num = len(left_out)
                return [[cpu for cpu in cpus if cpu.id in ids] for cpus, ids in pairs], left_out

        return ChosenCores

    replace("v1.executor.multiproc_executor:OMPProcessManager", make)
