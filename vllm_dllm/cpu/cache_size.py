"""The size of the KV cache on a CPU, where the user sets none.

vLLM reserves the share `--gpu-memory-utilization` of the machine's memory, refuses to start where
that much is not free, and writes every byte of it at the start: for the shipped checkpoint 22 GiB
in half a minute, of which 128 requests at once fill a fortieth. Here the cache gets what requests
can fill, and only that much must be free.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
from vllm.config import CacheConfig, VllmConfig
from vllm.logger import init_logger
from vllm.utils import cpu_resource_utils
from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(__name__)

CAPACITY_FACTOR = 2
"""Size of the cache, as a multiple of what all requests at once fill. The rest keeps prefixes."""
MIN_BYTES = 1 << 30
"""Least size of the cache, for prefixes of few or short requests; written in a second."""
CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


@contextmanager
def without_memory_check(config: CacheConfig) -> Iterator[None]:
    """Sets `kv_cache_memory_bytes` of `config` to 0 in this context, and to None again after it, so
    that vLLM's worker starts even where its default share of the memory is not free. Does nothing
    where the user has set a size or a share."""
    is_open = config.kv_cache_memory_bytes is None and not _user_set_share(config)
    if is_open:
        config.kv_cache_memory_bytes = 0
    try:
        yield
    finally:
        if is_open:
            config.kv_cache_memory_bytes = None


def _user_set_share(config: CacheConfig) -> bool:
    """Whether `--gpu-memory-utilization` differs from vLLM's default."""
    return config.gpu_memory_utilization != CacheConfig.gpu_memory_utilization


def available_cache_bytes(config: CacheConfig, node_id: int) -> int:
    """Returns how many bytes a worker that has loaded its model may use for its cache on memory
    node `node_id`. By default that is vLLM's default share of the free memory.

    If the user has set a share, it is what the worker leaves of that share of the whole node, but
    no more than is free. It may be negative.
    """
    node = cpu_resource_utils.get_memory_node_info(node_id)
    free, share = _free_bytes(node), config.gpu_memory_utilization
    if not _user_set_share(config):
        return int(free * share)
    own = psutil.Process().memory_info().rss
    return min(free, int(node.total_memory * share) - own)


def _free_bytes(node: cpu_resource_utils.MemoryNodeInfo) -> int:
    """Returns the free bytes of a memory node. In a container with a limit, vLLM counts cached
    files as used, although Linux gives their memory up; here they count as free."""
    limit = cpu_resource_utils.get_cgroup_memory_limit()
    used = cpu_resource_utils.get_cgroup_memory_usage()
    if limit != node.total_memory or used is None:  # another limit than the node's is not in force
        return node.available_memory
    files = sum(map(_page_cache_bytes, ("memory.stat", "memory/memory.stat")))
    return min(psutil.virtual_memory().available, limit - used + files)


def _page_cache_bytes(name: str) -> int:
    """Returns the bytes of cached files by the statistics in the file `name`; 0 if it is absent."""
    path = CGROUP / name
    if not path.exists():
        return 0
    lines = (line.split() for line in path.read_text().splitlines())
    return sum(int(value) for key, value in lines if key in ("active_file", "inactive_file"))


def check_longest_request_fits(
    num_bytes: int, specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig
) -> None:
    """Raises ValueError if a cache of `num_bytes` is too small for one request of the longest
    length, unless vLLM chooses that length. vLLM's own error rounds to tenths of a GiB and advises
    shares of a GPU. `specs`: the layers' caches by name."""
    model_config, needed = vllm_config.model_config, _longest_request_bytes(specs, vllm_config)
    # -1 lets vLLM choose a length that fits.
    if needed <= num_bytes or model_config.original_max_model_len == -1:
        return
    if vllm_config.cache_config.kv_cache_memory_bytes is None:
        share = vllm_config.cache_config.gpu_memory_utilization
        cause = f"of the memory, --gpu-memory-utilization {share:g} leaves {_format_mib(num_bytes)}"
        remedy = "stop other programs, or raise that share"
    else:
        cause = f"--kv-cache-memory-bytes (or VLLM_CPU_KVCACHE_SPACE) is {_format_mib(num_bytes)}"
        remedy = "raise it or leave it out"
    raise ValueError(
        f"A request of {model_config.max_model_len} tokens needs {_format_mib(needed)} of KV "
        f"cache, and {cause}. Lower --max-model-len, {remedy}."
    )


def _format_mib(num_bytes: int) -> str:
    return f"{max(num_bytes, 0) / (1 << 20):,.2f} MiB"


def _longest_request_bytes(specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig) -> int:
    return sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs.values())


def choose_cache_bytes(
    available_cache_bytes: int, specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig
) -> int:
    """Returns the size in bytes of a worker's cache for the layers `specs`: what requests can fill,
    and at most `available_cache_bytes`. Logs it if it is less.

    Raises:
        ValueError: one request of the longest length does not fit.
    """
    tokens = vllm_config.model_config.max_model_len
    requests = vllm_config.scheduler_config.max_num_seqs
    check_longest_request_fits(available_cache_bytes, specs, vllm_config)
    longest = _longest_request_bytes(specs, vllm_config)
    wanted = max(CAPACITY_FACTOR * requests * longest, MIN_BYTES)
    if not specs or wanted >= available_cache_bytes:
        return available_cache_bytes
    logger.info(
        "The KV cache gets %.2f of %.2f GiB: %d requests of %d tokens fill %.2f. "
        "--kv-cache-memory-bytes sets another size.",
        *(wanted / _GIB, available_cache_bytes / _GIB, requests, tokens, requests * longest / _GIB),
    )
    return wanted
