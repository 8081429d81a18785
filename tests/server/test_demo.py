"""`vllm-dllm demo` against a real server."""

import subprocess
import sys
from pathlib import Path

from tests.processes import HANGS_S
from tests.server.conftest import CHECKPOINT


def test_demo_piped() -> None:
    command = [str(Path(sys.executable).with_name("vllm-dllm")), "demo", str(CHECKPOINT)]
    result = subprocess.run(
        [*command, "--ask", "Reverse: rose chair lamp"],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Reverse: rose chair lamp" in result.stdout
    # The step that finishes the canvas, and the answer.
    assert result.stdout.count("lamp chair rose") >= 2
