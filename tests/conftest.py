"""What every test gets: a fixed seed, threads that sleep while they wait, and what it needs."""

import importlib.metadata
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

# OpenMP reads them when torch is imported. Engines and transformers share the cores, and threads
# that spin for long between parallel regions take them from the others.
os.environ.setdefault("KMP_BLOCKTIME", "300us")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# What was compiled for one width of vectors is wrong for another, and Inductor's cache of this
# processor does not tell them apart: two processes read tokens outside the vocabulary.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    caches = Path(tempfile.gettempdir(), f"caches-{os.getuid()}-{capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "inductor"))
    os.environ.setdefault("VLLM_CACHE_ROOT", str(caches / "vllm"))

# Processes that test side by side (`pytest -n`) get a core each: torch would use all of them, and
# vLLM's CPU worker the first.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    core = cores[int(worker.removeprefix("gw")) % len(cores)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(core))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from huggingface_hub import constants

from tests.features import TRIED
from tests.paths import ROOT

# Set by scripts/numerics.py. vLLM's kernels are those of the processor that torch says this is.
if level := os.environ.get("TESTED_CPU_LEVEL"):
    torch.cpu._is_avx512_supported = lambda: level == "avx512"
    torch.cpu._is_avx512_bf16_supported = lambda: False
    torch.cpu._is_amx_tile_supported = lambda: False

SLOW = {"engine", "faults", "server"}  # folders whose tests start engines
# Run only where they are asked for. The dry run needs a process in which no engine has replaced
# the GPU's kernels; the CUDA build and Ray, environments of their own.
APART = {"cuda_build", "faults", "gpu_dry_run", "on_ray"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.path.parent.name in APART:
            item.add_marker(item.path.parent.name)
        elif item.get_closest_marker("slow") and not item.nodeid.startswith(TRIED):
            item.add_marker("extended")
    asked_for = config.getoption("markexpr")
    absent = {name for name in (*APART, "thorough") if name not in asked_for}
    if not torch.cuda.is_available():
        absent.add("gpu")
    if not any(d.name == "flash-attn-4" for d in importlib.metadata.distributions()):
        absent.add("fa4")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        absent.add("compiler")
    if "VLLM_DLLM_SCHEMAS" not in os.environ:
        absent.add("schemas")
    if "VLLM_DLLM_PUBLISHED" not in os.environ:
        absent.add("published")
    left_out = [item for item in items if absent & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if worker:  # what takes long first: the last file of all keeps one core, and leaves the others
        items.sort(key=order)


def order(item: pytest.Item) -> int:
    """Servers are first: those that share one take longest."""
    if item.path.parent.name == "server":
        return 0
    return 1 if item.get_closest_marker("slow") else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files side by side (`--dist loadfile`), but those one after the other whose tests share the
    session's server, which starts once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    asks_for_it = re.compile(r"^def test_\w+\([^)]*\bserver: ", re.MULTILINE)

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            is_one = folder == "tests/server" and asks_for_it.search((ROOT / file).read_text())
            return folder if is_one else file

    return ByServer(config, log)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands leave their process changed, since it ends with them. That of tests goes on."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
    for name in ("lm_eval", "lm-eval", "datasets"):  # whose logs go to a folder of the command's
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", logger.handlers)
        monkeypatch.setattr(logger, "propagate", logger.propagate)
    if "no_proxy" not in os.environ:
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.delenv("no_proxy")
