"""Where measured times are kept: by everything that they depend on."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.measured import folder


class TextConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=TextConfig(hidden_size=64),
            dtype="bfloat16",
            quantization=None,
            max_model_len=4096,
            original_max_model_len=None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        diffusion_config=SimpleNamespace(canvas_length=256),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    machine = {"gpu": "NVIDIA H200", "driver": "570.1"}
    gpu = SimpleNamespace(get_device_name=lambda: machine["gpu"])
    monkeypatch.setattr(folder, "current_platform", gpu)
    monkeypatch.setattr(folder, "driver_version", lambda: machine["driver"])
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return machine


def test_all_that_times_depend_on_is_part_of_its_name(
    machine: dict[str, str], tmp_path: Path
) -> None:
    plain = folder.result_folder(config())
    assert plain == folder.result_folder(config())
    assert plain.parent == tmp_path / "vllm_dllm" / "kernels"
    assert plain.name.startswith("NVIDIA_H200-")
    others = {plain}
    for part, name, value in (
        ("model_config", "hf_text_config", TextConfig(hidden_size=128)),
        ("model_config", "dtype", "float16"),
        ("model_config", "quantization", "fp8"),
        ("model_config", "max_model_len", 8192),
        ("cache_config", "cache_dtype", "fp8"),
        ("diffusion_config", "canvas_length", 64),
        ("scheduler_config", "max_num_batched_tokens", 4096),
        ("parallel_config", "tensor_parallel_size", 2),
    ):
        changed = copy.deepcopy(config())
        setattr(getattr(changed, part), name, value)
        others.add(folder.result_folder(changed))
    for name in machine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(machine, name, "another")
            others.add(folder.result_folder(config()))
    assert len(others) == 11


def test_what_other_kernels_measured_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two installations from git may have one version."""
    names = {folder.result_folder(config())}
    for name in ("kernel.py", "tiles.json", "read.me"):
        kernels = tmp_path / name
        (kernels / "below").mkdir(parents=True)
        (kernels / "below" / name).touch()
        monkeypatch.setattr(folder, "KERNELS", (kernels,))
        names.add(folder.result_folder(config()))
    monkeypatch.setattr(folder, "KERNELS", ())
    assert len(names) == 4 and folder.result_folder(config()) in names


def test_a_context_that_is_fitted_to_memory_leaves_the_name(machine: dict[str, str]) -> None:
    """The server asks before vLLM fits it, and the workers afterwards."""
    names = []
    for longest in (262_144, 40_000):
        fitted = config()
        fitted.model_config.original_max_model_len = -1
        fitted.model_config.max_model_len = longest
        names.append(folder.result_folder(fitted))
    assert names[0] == names[1] != folder.result_folder(config())


def test_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    assert folder.read_result(path) is None
    folder.write_json(path, folder.RESULT, {"gpu": "x"})
    assert folder.read_result(path) == {"gpu": "x"}
    assert [each.name for each in path.iterdir()] == [folder.RESULT]
    for damaged in ("{", "[]"):
        (path / folder.RESULT).write_text(damaged)
        assert folder.read_result(path) is None
