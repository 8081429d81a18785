"""vLLM finds our tiles where it has none: under the name it asks for, for the numbers of rows it
asks about."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.platforms import current_platform

from bench.dummy_checkpoint import SHAPE_26B
from vllm_dllm.config import tiles
from vllm_dllm.serving_config.experts import set_moe_backend

EXPERTS, WIDTH = SHAPE_26B["num_experts"], SHAPE_26B["moe_intermediate_size"]


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setenv(tiles.VARIABLE, "none yet")
    monkeypatch.delenv(tiles.VARIABLE)
    forget()
    yield
    forget()


def forget() -> None:
    fused_moe.get_moe_configs.cache_clear()
    fused_moe.get_device_name_as_file_name.cache_clear()


def tiles_of(rows: int, dtype: str | None = "fp8_w8a8") -> dict[str, int]:
    """What vLLM would run for a step of `rows` tokens."""
    hidden = SHAPE_26B["hidden_size"]
    first, second = (EXPERTS, 2 * WIDTH, hidden), (EXPERTS, hidden, WIDTH)
    top_k = SHAPE_26B["top_k_experts"]
    return fused_moe.try_get_optimal_moe_config(first, second, top_k, dtype, rows)


@pytest.mark.parametrize(
    ("rows", "m"), [(256, 64), (300, 64), (1024, 64), (2048, 128), (4096, 128), (8192, 128)]
)
def test_found_by_vllm(rows: int, m: int) -> None:
    tiles.set_tuned_config_folder()
    found = tiles_of(rows)
    assert found["BLOCK_SIZE_M"] == m and found["num_warps"] == 4


def test_other_types_keep_vllm_s() -> None:
    before = tiles_of(2048, None)
    forget()
    tiles.set_tuned_config_folder()
    assert tiles_of(2048, None) == before


def test_every_file_has_a_name_that_vllm_asks_for() -> None:
    names = {fused_moe.get_config_file_name(EXPERTS, WIDTH, dtype) for dtype in (None, "fp8_w8a8")}
    assert set(tiles.shipped_block_sizes()) == names
    assert {file.name for file in tiles.FOLDER.glob("E=*.json")} < names


FP8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group"}


def config(
    weights: dict[str, Any] | None = FP8,
    ranks: int = 1,
    replicas: int = 1,
    splits_experts: bool = False,
    backend: str = "auto",
) -> Any:
    quantization = None if weights is None else {"config_groups": {"group_0": {"weights": weights}}}
    return SimpleNamespace(
        kernel_config=SimpleNamespace(moe_backend=backend),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(quantization_config=quantization),
            hf_text_config=SimpleNamespace(num_experts=EXPERTS, moe_intermediate_size=WIDTH),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            data_parallel_size=replicas,
            prefill_context_parallel_size=1,
            enable_expert_parallel=splits_experts,
        ),
    )


def backend_of(given: Any) -> str:
    set_moe_backend(given)
    return str(given.kernel_config.moe_backend)


def test_fp8_experts_run_the_kernel_that_has_tiles() -> None:
    assert backend_of(config()) == "triton"


@pytest.mark.parametrize(
    "given",
    [
        config(NVFP4),
        config(None),
        config(FP8 | {"strategy": "tensor"}),
        config(ranks=2),
        config(replicas=2),
        config(ranks=2, splits_experts=True),
        config(backend="cutlass"),
    ],
    ids=["NVFP4", "bf16", "FP8 by tensor", "half", "half, DP", "half, EP", "the user's"],
)
def test_other_experts_keep_their_kernel(given: Any) -> None:
    before = given.kernel_config.moe_backend
    assert backend_of(given) == before


def test_other_gpus_and_tiles_of_the_user_keep_vllm_s_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(tiles.VARIABLE, "/mine")
    assert backend_of(config()) == "auto"
    own = config()
    set_moe_backend(own, Path("/mine"))
    assert own.kernel_config.moe_backend == "triton", "the folder of this server's measurements"
    monkeypatch.delenv(tiles.VARIABLE)
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: "NVIDIA A100")
    forget()
    assert backend_of(config()) == "auto"
    dense = config()
    dense.model_config.hf_text_config = SimpleNamespace()
    assert backend_of(dense) == "auto"


def test_the_user_s_folder_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiles.VARIABLE, "/mine")
    tiles.set_tuned_config_folder()
    assert os.environ[tiles.VARIABLE] == "/mine"


def test_this_server_s_folder_begins_with_what_is_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And keeps what was measured."""
    shipped = list(tiles.FOLDER.glob("E=*.json"))
    own = tmp_path / "kernels"
    tiles.set_tuned_config_folder(own)
    assert os.environ.pop(tiles.VARIABLE) == str(own)
    assert {path.name for path in own.iterdir()} == {path.name for path in shipped}
    assert all((own / path.name).read_text() == path.read_text() for path in shipped)
    (own / shipped[0].name).write_text("{}")
    tiles.set_tuned_config_folder(own)
    assert (own / shipped[0].name).read_text() == "{}"


def test_a_folder_that_cannot_be_written_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    warned: list[Any] = []
    monkeypatch.setattr(tiles.logger, "warning", lambda *said: warned.append(said))
    tiles.set_tuned_config_folder(file / "kernels")
    assert os.environ[tiles.VARIABLE] == str(tiles.FOLDER) and len(warned) == 1


def test_none_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    tiles.set_tuned_config_folder()
    assert tiles.VARIABLE not in os.environ


@pytest.mark.parametrize("backend", ["auto", "triton", "cutlass"])
def test_a_kernel_that_the_user_named_is_not_replaced(backend: str) -> None:
    assert tiles.may_replace_experts(config(backend=backend)) == (backend != "cutlass")


def test_batch_invariant_steps_keep_vllm_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    assert not tiles.may_replace_experts(config()) and backend_of(config()) == "auto"
