"""Which way a CPU runs the forward."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_dllm.cpu import compilation, norm
from vllm_dllm.tools.pretrain.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def config(checkpoint: Path, **options: Any) -> VllmConfig:
    return EngineArgs(str(checkpoint), **options).create_engine_config()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "")  # so that the test's end restores it
    monkeypatch.delenv("VLLM_USE_AOT_COMPILE")


def way(config: VllmConfig) -> tuple[CompilationMode, str, bool]:
    norms = config.kernel_config.ir_op_priority.rms_norm
    return (
        config.compilation_config.mode,
        config.compilation_config.backend,
        norms[0] == norm.PROVIDER,
    )


def test_compiles_where_there_is_a_compiler(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "has_compiler", lambda: True)
    assert way(config(checkpoint)) == (CompilationMode.DYNAMO_TRACE_ONCE, "inductor", False)


def test_traces_where_there_is_none(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "has_compiler", lambda: False)
    assert way(config(checkpoint)) == (CompilationMode.DYNAMO_TRACE_ONCE, "eager", True)
    assert compilation.os.environ["VLLM_USE_AOT_COMPILE"] == "0"


@pytest.mark.parametrize("is_there", [True, False])
def test_obeys_the_user(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.setattr(compilation, "has_compiler", lambda: is_there)
    eager = config(checkpoint, enforce_eager=True)
    assert way(eager) == (CompilationMode.NONE, eager.compilation_config.backend, True)
    assert way(config(checkpoint, optimization_level=0))[0] == CompilationMode.NONE
    asked = config(checkpoint, compilation_config={"mode": 2, "backend": "inductor"})
    assert way(asked) == (CompilationMode.DYNAMO_TRACE_ONCE, "inductor", False)


def test_a_compiler_without_the_headers_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: "/nonexistent")
    assert not compilation.has_compiler()
