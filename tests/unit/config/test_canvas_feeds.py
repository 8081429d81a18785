"""The folder of a server's feeds: its owner's, handed down, and gone at the end."""

import os
from pathlib import Path

import pytest

from tests.processes import output_of
from vllm_dllm.config import canvas_feeds


def test_a_folder_lasts_as_long_as_the_first_process(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        "import subprocess, sys\n"
        "from vllm_dllm.config import canvas_feeds\n"
        "canvas_feeds.make_socket_folder(sys.argv[1])\n"
        "folder = canvas_feeds.socket_folder()\n"
        "if len(sys.argv) == 2:\n"
        "    subprocess.run([sys.executable, *sys.argv, 'child'], check=True)\n"
        "print(folder, oct(folder.stat().st_mode & 0o777), flush=True)\n"
    )
    base = tmp_path / "base"
    base.mkdir()
    env = {key: value for key, value in os.environ.items() if key != canvas_feeds.FOLDER}
    child, parent = output_of(program, base, env=env).splitlines()
    assert child == parent and parent.startswith(f"{base}/") and parent.endswith(" 0o700")
    assert not list(base.iterdir())


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^VLLM_RPC_BASE_PATH must leave room .* \(107 bytes"):
        canvas_feeds.socket_path(tmp_path / ("x" * 100), canvas_feeds.new_random_name())
