"""Which cores vLLM gives its CPU workers, and how long waiting processes keep a core busy."""

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.utils import cpu_resource_utils, torch_utils

from vllm_dllm.compat.patching import patch, wrap

available_cpu_count = torch_utils.available_cpu_count


def set_core_choice(choose: Callable[[list[list[int]]], list[list[int]]], worker_cls: str) -> None:
    """Patches this process' engine to give workers of `worker_cls` the cores that `choose` returns,
    where the user leaves the choice open. Also lets several workers share a memory node, which vLLM
    refuses. Repeatable.

    `choose` gets the ids of the cores that vLLM could give each worker, and returns some of them.
    """

    def extend(stock: Any) -> Any:
        """Returns a subclass of vLLM's chooser of cores `stock`."""

        class ChosenCores(stock):
            """vLLM's chooser of cores, except where the choice is ours."""

            local_world_size: int

            def __init__(self, config: VllmConfig) -> None:
                self.choice_is_ours = (
                    config.parallel_config.worker_cls == worker_cls
                    and envs.VLLM_CPU_NUM_OF_RESERVED_CPU is None
                    and config.kv_transfer_config is None  # vLLM reserves cores for its threads
                )
                super().__init__(config)

            def _bind_cores(self, cpu_selector: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
                """Returns the cores of each worker and the reserved cores as vLLM does. Divides a
                node's cores among its workers if there are fewer nodes."""
                num_workers: int = self.local_world_size
                num_nodes = len(cpu_resource_utils.get_visible_memory_node())
                shares_nodes = 0 < num_nodes < num_workers and not self.simulate_multi_node
                if shares_nodes:
                    self.local_world_size = num_nodes
                try:
                    cores, reserved = super()._get_autobind_cpu_ids(cpu_selector)
                finally:
                    self.local_world_size = num_workers
                if shares_nodes:
                    cores = split_node_cores(cores, num_workers)
                return cores, reserved

            def _get_autobind_cpu_ids(
                self, cpu_selector: Callable[..., Any]
            ) -> tuple[list[Any], list[Any]]:
                """Returns the chosen cores of each worker, and those that are left out."""
                if not self.choice_is_ours:
                    return self._bind_cores(cpu_selector)
                self.reserve_cpu_num = 0
                by_worker, _ = self._bind_cores(cpu_selector)
                chosen = choose([[cpu.id for cpu in cpus] for cpus in by_worker])
                pairs = list(zip(by_worker, chosen, strict=True))
                left_out = [cpu for cpus, ids in pairs for cpu in cpus if cpu.id not in ids]
                self.reserve_cpu_num = len(left_out)
                return [[cpu for cpu in cpus if cpu.id in ids] for cpus, ids in pairs], left_out

        return ChosenCores

    patch("v1.executor.multiproc_executor:OMPProcessManager", extend)


def split_node_cores(by_node: list[list[Any]], num_workers: int) -> list[list[Any]]:
    """Returns the cores of each of `num_workers` workers on fewer memory nodes. With fewer cores
    than workers, some get the same core. `by_node`: each node's cores."""
    by_worker = []
    for node, cores in enumerate(by_node):
        first, end = (n * num_workers // len(by_node) for n in (node, node + 1))
        size = max(1, len(cores) // (end - first))
        by_worker += [cores[i * size % len(cores) :][:size] for i in range(end - first)]
    return by_worker


BUSY_WAIT_S = 0.02
"""Seconds that an engine and its workers poll for each other's next message before they sleep. A
step of the shipped model takes 10 ms, so they are awake for its answer. Without polling, vLLM's
readers miss messages: ZeroMQ drops the second of two calls within about a millisecond."""


def shorten_busy_wait() -> None:
    """Limits polling of this process' readers to `BUSY_WAIT_S`. Repeatable.

    vLLM polls for a second after each message. Where all cores compute, that slows the model: by 12
    to 20% of a step of 267 million parameters on two cores.
    """

    @wrap("distributed.device_communicators.shm_broadcast:SpinCondition.__init__")
    def init(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, BUSY_WAIT_S)
