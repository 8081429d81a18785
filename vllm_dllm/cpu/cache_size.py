"""How large a KV cache is on a CPU, where the user leaves that open.

vLLM gives it all that `--gpu-memory-utilization` leaves of the machine's memory, and every byte of
it is written when the server starts: the shipped checkpoint took 22 GiB and half a minute for room
that 128 requests at once fill to a fortieth. Here it gets what requests can fill.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

ROOM = 2
"""Times what all requests at once fill: as much again keeps prefixes of those that have ended."""
LEAST_BYTES = 1 << 30
"""Where a few short requests fill less: prefixes have room, and it is written in a second."""


def cache_bytes(
    available_bytes: int, specs: Mapping[str, KVCacheSpec], vllm_config: "VllmConfig"
) -> int:
    """The size for a worker that has `available_bytes` for it, and these layers."""
    requests = vllm_config.scheduler_config.max_num_seqs
    longest = sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs.values())
    wanted = max(ROOM * requests * longest, LEAST_BYTES)
    if not specs or wanted >= available_bytes:
        return available_bytes
    logger.info(
        "The KV cache gets %.2f of %.2f GiB: %d requests of %d tokens fill %.2f. "
        "--kv-cache-memory-bytes sets another size.",
        wanted / 2**30,
        available_bytes / 2**30,
        requests,
        vllm_config.model_config.max_model_len,
        requests * longest / 2**30,
    )
    return wanted
