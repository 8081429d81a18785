"""What a start compiled, the next one loads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import envs

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.processes import run

pytestmark = pytest.mark.compiler

PROGRAM = Path(__file__).with_name("start_compiled.py")
ANNOUNCED = "Compiling Gemma4Model for this machine, once"


class Starts:
    """Engines that share a cache, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        if (inspected := Path(envs.VLLM_CACHE_ROOT, "modelinfos")).is_dir():
            shutil.copytree(inspected, self.cache / inspected.name)
        self.checkpoint = make_tiny_checkpoint(
            folder / "checkpoint", layer_types=("full_attention",)
        )

    def start(self) -> subprocess.CompletedProcess[str]:
        settings = {"VLLM_CACHE_ROOT": str(self.cache), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return run(sys.executable, PROGRAM, self.checkpoint, variables=settings)

    def libraries(self) -> dict[Path, int]:
        """When each was last written, in ns."""
        return {path: path.stat().st_mtime_ns for path in self.cache.rglob("*.so")}


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("RESULT"))


def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    first = starts.start()
    cold = result(first)
    assert (cold["compiled"], cold["loaded"]) == (1, 0) and cold["traced"] > 0
    assert (first.stdout + first.stderr).count(ANNOUNCED) == 1
    built = starts.libraries()
    assert built

    second = starts.start()
    warm = result(second)
    assert (warm["compiled"], warm["loaded"], warm["traced"]) == (0, 1, 0)
    assert ANNOUNCED not in second.stdout + second.stderr
    assert starts.libraries() == built
    assert warm["answer"] == cold["answer"]
