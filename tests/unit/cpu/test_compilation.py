"""Which way a CPU runs the forward."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Artifact
from vllm.config import CompilationMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs

import vllm_dllm
from tests.patched import patched
from tests.paths import CHECKPOINTS
from vllm_dllm.cpu import compilation, cores


def config(**options: Any) -> VllmConfig:
    return EngineArgs(str(CHECKPOINTS / "diffusiongemma-tiny"), **options).create_engine_config()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "")  # so that the test's end restores it
    monkeypatch.delenv("VLLM_USE_AOT_COMPILE")


TRACED = (CompilationMode.DYNAMO_TRACE_ONCE, "eager", True)
COMPILED = (CompilationMode.DYNAMO_TRACE_ONCE, "inductor", False)
EAGER = (CompilationMode.NONE, None, True)


@pytest.mark.parametrize(
    ("asked", "with_compiler", "without"),
    [
        ({}, COMPILED, TRACED),
        ({"enforce_eager": True}, EAGER, EAGER),
        ({"optimization_level": 0}, EAGER, EAGER),
        ({"compilation_config": {"mode": 2, "backend": "inductor"}}, COMPILED, COMPILED),
        ({"data_parallel_size": 2}, EAGER, EAGER),
    ],
    ids=["nothing", "eager", "level 0", "inductor", "shared experts"],
)
@pytest.mark.parametrize("is_there", [True, False], ids=["a compiler", "none"])
def test_what_is_asked_for_or_what_the_compiler_allows(
    monkeypatch: pytest.MonkeyPatch, asked: Any, with_compiler: Any, without: Any, is_there: bool
) -> None:
    monkeypatch.setattr(compilation, "has_compiler", lambda: is_there)
    found = config(**asked)
    mode, backend, has_our_norm = with_compiler if is_there else without
    assert found.compilation_config.mode == mode
    assert backend in (None, found.compilation_config.backend)
    norms = found.kernel_config.ir_op_priority.rms_norm
    assert (norms[0] == compilation.NORM_PROVIDER) == has_our_norm
    if backend == "eager":
        assert compilation.os.environ["VLLM_USE_AOT_COMPILE"] == "0"


def test_a_compiler_without_the_headers_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: "/nonexistent")
    assert not compilation.has_compiler()


@pytest.mark.parametrize("name", ["file/cache", "read-only/cache", "filled", "new/cache"])
def test_a_model_is_compiled_only_if_there_is_a_place_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """A container's user often has no home that it may write to. Of one who may write everywhere,
    all folders but the first are taken to be read-only."""
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir()
    (tmp_path / "filled" / "torch_compile_cache").mkdir(parents=True)
    monkeypatch.setattr(compilation.os, "access", lambda path, mode: path == str(tmp_path))
    monkeypatch.setattr(compilation, "has_compiler", lambda: True)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / name))
    backend = config().compilation_config.backend
    assert backend == ("inductor" if name == "new/cache" else "eager")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """What vLLM's key of a compiled model has of the configuration."""
    monkeypatch.setattr(Artifact, "finalize_loading", None, raising=False)
    config = VllmConfig(additional_config={"vllm_dllm": {}})

    def find() -> str:
        compilation.reuse_compiled_models(config)
        return config.compute_hash()

    with patched("compilation.decorators:_try_load_aot_compiled_fn"):
        yield find


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (compilation, "instruction_set", "avx avx2"),
        (compilation, "hash_model_sources", "edited"),
        (compilation.torch, "get_num_threads", 97),
        (compilation.torch.backends.cpu, "get_cpu_capability", "DEFAULT 2"),
        (compilation.platform, "machine", "aarch64"),
    ],
    ids=["instructions", "sources", "threads", "vectors", "architecture"],
)
def test_a_compiled_model_is_not_loaded_after_a_change(
    key: Callable[[], str], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any
) -> None:
    before = key()
    assert key() == before
    monkeypatch.setattr(place, name, lambda: value)
    assert key() != before


def test_instruction_set(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: A CPU\nflags\t\t: sse avx2 amx_tile\nflags\t\t: sse\n")
    assert cores.instruction_set(cpuinfo) == "amx_tile avx2 sse"
    cpuinfo.write_text("Features\t: sve asimd\n")
    assert cores.instruction_set(cpuinfo) == "asimd sve"
    assert cores.instruction_set(tmp_path / "none") != ""


def test_sources(tmp_path: Path) -> None:
    """Every file of the folders that build models counts, and where the package lies does not."""
    package = Path(vllm_dllm.__path__[0])
    for folder in compilation.MODEL_FOLDERS:
        assert list((package / folder).glob("*.py"))
        shutil.copytree(package / folder, tmp_path / folder)
    assert compilation.hash_model_sources(tmp_path) == compilation.hash_model_sources()
    with (tmp_path / "models" / "diffusion_gemma.py").open("a") as file:
        file.write("# edited")
    assert compilation.hash_model_sources(tmp_path) != compilation.hash_model_sources()


OUTSIDE_FORWARD = {"denoise", "requests", "step"}
"""Folders that models import only for what runs around the compiled forward, and that do not shape
the model: the sampler's constants, checks of images, and the classes of model states."""


def test_each_folder_that_models_import_is_hashed_or_outside_of_the_forward() -> None:
    package = Path(vllm_dllm.__path__[0])
    imported = {
        name
        for file in (package / "models").rglob("*.py")
        for name in re.findall(r"(?m)^ *(?:from|import) vllm_dllm\.(\w+)", file.read_text())
    }
    assert imported >= {"attention", "step"}, "late imports count, too"
    assert imported <= {*compilation.MODEL_FOLDERS} | OUTSIDE_FORWARD
