"""FlashAttention-4 that another process compiles: what it stored is kept if it did not fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dllm.attention.ahead import Compiler


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_kept_if_all_were_compiled(tmp_path: Path, fails: bool) -> None:
    kept, partial = tmp_path / "kept", tmp_path / "partial"
    (partial / "fwd").mkdir(parents=True)
    (partial / "fwd" / "kernel.o").write_bytes(b"code")
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({int(fails)})"])
    compiler = Compiler(process, partial, kept, done=kept / "these.done")
    for _ in range(2):  # before graphs are measured, and before kernels are warmed up
        compiler.wait()
    assert compiler.done.exists() == (kept / "fwd" / "kernel.o").exists() == (not fails)
    assert not partial.exists()
