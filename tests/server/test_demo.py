"""`vllm-dllm demo` against a real server."""

import re
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
    # Each step is shown, in order.
    shown = [int(n) for n in re.findall(r"^canvas 1  step +(\d+)  ", result.stdout, re.MULTILINE)]
    assert f"\n{len(shown)} steps on 1 canvas, " in result.stdout
    assert shown == list(range(1, len(shown) + 1))
    assert "<svg" in (tmp_path / "canvas.svg").read_text()
