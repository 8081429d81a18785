"""`vllm-dllm demo` against a real server."""

import subprocess
import sys
from pathlib import Path

from tests.processes import HANGS_S


def test_demo_piped(tmp_path: Path) -> None:
    """With the checkpoint of the package, from a folder of the user's."""
    command = [str(Path(sys.executable).with_name("vllm-dllm")), "demo", "--ask", "Sort: q d x"]
    result = subprocess.run(
        [*command, "--save-picture", "canvas.svg"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Sort: q d x" in result.stdout
    # The step that finishes the canvas, and the answer.
    assert result.stdout.count("d q x") >= 2
    assert "<svg" in (tmp_path / "canvas.svg").read_text()
