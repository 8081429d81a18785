"""How large a KV cache is on a CPU, where the user leaves that open.

vLLM gives it all that `--gpu-memory-utilization` leaves of the machine's memory, refuses to start
where that much is not free, and writes every byte of it when the server starts: the shipped
checkpoint took 22 GiB and half a minute for room that 128 requests at once fill to a fortieth. Here
it gets what requests can fill, and that much must be free.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from vllm.config import CacheConfig
from vllm.logger import init_logger
from vllm.utils import cpu_resource_utils
from vllm.v1.kv_cache_interface import KVCacheSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

ROOM = 2
"""Times what all requests at once fill: as much again keeps prefixes of those that have ended."""
LEAST_BYTES = 1 << 30
"""Where a few short requests fill less: prefixes have room, and it is written in a second."""
CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


@contextmanager
def without_memory_check(config: CacheConfig) -> Iterator[None]:
    """Sets `kv_cache_memory_bytes` to 0 while the body runs, so that vLLM's worker starts even
    where its default share of the memory is not free. Does nothing where the user has set a
    size or a share. `available_bytes` checks later."""
    is_open = config.kv_cache_memory_bytes is None and not _has_share(config)
    if is_open:
        config.kv_cache_memory_bytes = 0
    try:
        yield
    finally:
        if is_open:
            config.kv_cache_memory_bytes = None


def _has_share(config: CacheConfig) -> bool:
    return config.gpu_memory_utilization != CacheConfig.gpu_memory_utilization


def available_bytes(config: CacheConfig, node_id: int) -> int:
    """What a worker that has loaded its model may take for its cache on its memory node: that share
    of what is free; what is left of the share of the whole, where the user has named one. May be
    negative then."""
    node = cpu_resource_utils.get_memory_node_info(node_id)
    free, share = _free_bytes(node), config.gpu_memory_utilization
    if not _has_share(config):
        return int(free * share)
    own = psutil.Process().memory_info().rss
    return min(free, int(node.total_memory * share) - own)


def _free_bytes(node: cpu_resource_utils.MemoryNodeInfo) -> int:
    """What can be had on a node. In a container with a limit, vLLM counts the files that it has
    read as used, although they give way."""
    limit = cpu_resource_utils.get_cgroup_memory_limit()
    used = cpu_resource_utils.get_cgroup_memory_usage()
    if limit != node.total_memory or used is None:  # another limit than the node's is not in force
        return node.available_memory
    files = sum(map(_counter, ("memory.stat", "memory/memory.stat")))
    return min(psutil.virtual_memory().available, limit - used + files)


def _counter(name: str) -> int:
    """Bytes of files in memory, by a control group's statistics; 0 where there are none."""
    path = CGROUP / name
    if not path.exists():
        return 0
    lines = (line.split() for line in path.read_text().splitlines())
    return sum(int(value) for key, value in lines if key in ("active_file", "inactive_file"))


def check_room(num_bytes: int, specs: Mapping[str, KVCacheSpec], vllm_config: "VllmConfig") -> None:
    """Raises ValueError where a cache of that size has no room for one request of the longest
    length. vLLM rounds the sizes to tenths of a GiB, and advises shares of a GPU."""
    model_config, needed = vllm_config.model_config, _longest(specs, vllm_config)
    # -1 lets vLLM choose a length that fits.
    if needed <= num_bytes or model_config.original_max_model_len == -1:
        return
    if vllm_config.cache_config.kv_cache_memory_bytes is None:
        share = vllm_config.cache_config.gpu_memory_utilization
        cause = f"of the memory, --gpu-memory-utilization {share:g} leaves {_mib(num_bytes)}"
        remedy = "stop other programs, or raise that share"
    else:
        cause = f"--kv-cache-memory-bytes (or VLLM_CPU_KVCACHE_SPACE) is {_mib(num_bytes)}"
        remedy = "raise it or leave it out"
    raise ValueError(
        f"A request of {model_config.max_model_len} tokens needs {_mib(needed)} of KV cache, and "
        f"{cause}. Lower --max-model-len, {remedy}."
    )


def _mib(num_bytes: int) -> str:
    return f"{max(num_bytes, 0) / (1 << 20):,.2f} MiB"


def _longest(specs: Mapping[str, KVCacheSpec], vllm_config: "VllmConfig") -> int:
    """Bytes of a request of the longest length."""
    return sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs.values())


def cache_bytes(
    available_bytes: int, specs: Mapping[str, KVCacheSpec], vllm_config: "VllmConfig"
) -> int:
    """The size of a worker's cache that has `available_bytes` for it, and these layers.

    Raises:
        ValueError: not even one request of the longest length has room.
    """
    tokens, requests = (
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_seqs,
    )
    check_room(available_bytes, specs, vllm_config)
    longest = _longest(specs, vllm_config)
    wanted = max(ROOM * requests * longest, LEAST_BYTES)
    if not specs or wanted >= available_bytes:
        return available_bytes
    logger.info(
        "The KV cache gets %.2f of %.2f GiB: %d requests of %d tokens fill %.2f. "
        "--kv-cache-memory-bytes sets another size.",
        *(wanted / _GIB, available_bytes / _GIB, requests, tokens, requests * longest / _GIB),
    )
    return wanted
