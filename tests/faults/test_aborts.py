"""A thousand clients that leave."""

from pathlib import Path

import psutil

from tests.server.aborts import seeded_answers, storm
from tests.server.conftest import CHECKPOINT, UNCOMPILED, serving
from tests.server.open_requests import metric, wait_until_unfinished
from vllm_dllm.tools.server_process import HOST

GROWTH_MIB = 32
"""For what Python keeps of a thousand requests, whatever they were. A request that is not forgotten
takes 0.1 MiB and more."""

KEEPS_LITTLE = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""oneDNN keeps 1,024 products, one for each number of rows, of up to 1 MiB each, and glibc freed
memory: a worker grows until it has all of them, whether requests are forgotten or not."""


def memory_mib(port: int) -> float:
    (leader,) = {
        c.pid for c in psutil.net_connections() if c.laddr == (HOST, port) and c.status == "LISTEN"
    }
    process = psutil.Process(leader)
    everyone = [process, *process.children(recursive=True)]
    return sum(one.memory_info().rss for one in everyone) / 2**20


def test_a_thousand_aborts(tmp_path: Path) -> None:
    # A cache so small that the first storm has been all over it: memory counts when it is written.
    options = (*UNCOMPILED, "--max-num-seqs", "32", "--kv-cache-memory-bytes", "64M")
    with serving(CHECKPOINT, tmp_path, *options, env=KEEPS_LITTLE) as server:
        before = seeded_answers(server)
        storm(server, count=300, at_once=32)  # what grows at first
        wait_until_unfinished(server, 0)
        memory = memory_mib(server.port)
        storm(server, count=1000, at_once=32)
        wait_until_unfinished(server, 0)
        assert metric(server, "kv_cache_usage_perc") == 0
        assert seeded_answers(server) == before
        grown = memory_mib(server.port) - memory
        print(f"memory grew by {grown:.1f} MiB")
        assert grown < GROWTH_MIB
