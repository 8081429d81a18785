"""Which cores vLLM gives its CPU workers, and how many threads they compute with."""

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.utils import ompmultiprocessing, torch_utils

available_cpu_count = torch_utils.available_cpu_count


def choose_cores(choose: Callable[[list[list[int]]], list[list[int]]], worker_cls: str) -> None:
    """Where the user leaves the choice open, workers of `worker_cls` get the cores that `choose`
    returns, of those that vLLM could give each: the ids of its node's cores. Repeatable."""
    manager = ompmultiprocessing.OMPProcessManager
    if manager.__init__.__module__ == __name__:
        return
    stock_init, stock_choice = manager.__init__, manager._get_autobind_cpu_ids

    def init(self: Any, config: VllmConfig) -> None:
        self.choice_is_ours = (
            config.parallel_config.worker_cls == worker_cls
            and envs.VLLM_CPU_NUM_OF_RESERVED_CPU is None
            and config.kv_transfer_config is None  # vLLM reserves cores for its threads, too
        )
        stock_init(self, config)

    def get_autobind_cpu_ids(self: Any, cpu_selector: Callable[..., Any]) -> tuple[Any, Any]:
        if not self.choice_is_ours:
            return stock_choice(self, cpu_selector)
        self.reserve_cpu_num = 0
        by_worker, _ = stock_choice(self, cpu_selector)
        chosen = choose([[cpu.id for cpu in cpus] for cpus in by_worker])
        pairs = list(zip(by_worker, chosen, strict=True))
        left_out = [cpu for cpus, ids in pairs for cpu in cpus if cpu.id not in ids]
        self.reserve_cpu_num = len(left_out)
        return [[cpu for cpu in cpus if cpu.id in ids] for cpus, ids in pairs], left_out

    manager.__init__ = init
    manager._get_autobind_cpu_ids = get_autobind_cpu_ids


def keep_threads() -> None:
    """A worker that has loaded its model keeps its threads. vLLM leaves a GPU's worker one, and on
    CPUs only warns that several may be too many. Repeatable."""
    from vllm.v1.worker import gpu_worker  # the CPU worker's base, loaded by now

    gpu_worker.set_torch_threads_for_runtime = lambda: None
