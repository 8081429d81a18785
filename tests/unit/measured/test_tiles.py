"""Tiles of experts, and our kernel for them, by a clock that says what each takes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dllm.compat import experts
from vllm_dllm.config.tiles import FOLDER
from vllm_dllm.measured import expert_kernels
from vllm_dllm.measured.stopwatch import Stopwatch

MODEL_SIZE, EXPERTS = 8, 4
STOCK = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32}


class Kernel:
    """Stands in for a layer's experts: notes the size of blocks or the tiles that it runs with."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, Any]] = []

    def run(self, layer: Any, size: int, states: torch.Tensor, tiles: Any = None) -> torch.Tensor:
        assert states.shape[1] == MODEL_SIZE and states.dtype == torch.bfloat16
        self.ran.append((len(states), size or tiles))
        return states


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(experts, "find_expert_layers", lambda modules: modules)
    monkeypatch.setattr(experts, "has_tunable_tiles", lambda layer: layer.has_tiles)
    monkeypatch.setattr(experts, "tiles_file_name", lambda layer: layer.file)
    monkeypatch.setattr(experts, "tiles_in_use", lambda layer, rows: STOCK)
    monkeypatch.setattr(expert_kernels, "block_size", lambda layer, rows: layer.sizes.get(rows, 0))
    monkeypatch.setattr(expert_kernels, "run_layer", kernel.run)
    return kernel


def layer(file: str, has_tiles: bool = True, sizes: dict[int, int] | None = None) -> Any:
    """`sizes` of blocks that our kernel would take, by rows of a step."""
    return SimpleNamespace(
        file=file,
        has_tiles=has_tiles,
        sizes=sizes or {},
        w2_weight=torch.zeros(EXPERTS, MODEL_SIZE, 2),
        hidden_size=MODEL_SIZE,
        params_dtype=torch.bfloat16,
    )


def shipped_tiles() -> list[dict[str, int]]:
    (path,) = FOLDER.glob("E=*.json")
    return [each for each in json.loads(path.read_text()).values() if isinstance(each, dict)]


def test_each_number_of_rows_gets_its_fastest(kernel: Kernel) -> None:
    best = {256: shipped_tiles()[0], 2048: STOCK}

    def clock(run: Any) -> float:
        run()
        rows, chosen = kernel.ran[-1]
        return 1.0 if chosen == best[rows] else 1.3

    layers = [layer("E=4,N=2.json"), layer("E=4,N=2.json"), layer("E=4,N=3.json")]
    tables, ours, gains = expert_kernels.measure_experts(layers, (256, 2048), Stopwatch(clock))
    expected = {"256": shipped_tiles()[0], "2048": STOCK}
    assert tables == {"E=4,N=2.json": expected, "E=4,N=3.json": expected}
    assert ours == {file: {"256": 0, "2048": 0} for file in tables}, "vLLM's, whatever we ship"
    assert gains == ["experts at 256 rows 1.30 times"] * 2
    tried = {json.dumps(chosen) for rows, chosen in kernel.ran if rows == 256}
    assert tried == {json.dumps(each) for each in (STOCK, *shipped_tiles())}


def test_what_could_not_be_timed_is_left_to_vllm(kernel: Kernel) -> None:
    stopwatch = Stopwatch(lambda run: 1.0, until=0)
    assert expert_kernels.measure_experts([layer("a.json")], (256,), stopwatch) == ({}, {}, [])


@pytest.mark.parametrize("has_tiles", [True, False], ids=["Triton", "CUTLASS"])
def test_ours_computes_the_steps_that_it_is_fastest_for(kernel: Kernel, has_tiles: bool) -> None:
    ms = {(256, 32): 0.5, (2048, 128): 1.5}

    def clock(run: Any) -> float:
        run()
        rows, chosen = kernel.ran[-1]
        return ms.get((rows, chosen), 1.0) if isinstance(chosen, int) else 1.0

    one = layer("a.json", has_tiles, {256: 32, 2048: 128})
    tables, ours, gains = expert_kernels.measure_experts([one], (256, 2048, 8192), Stopwatch(clock))
    assert ours == {"a.json": {"256": 32, "2048": 0, "8192": 0}}
    assert gains == ["experts at 256 rows 2.00 times"]
    assert tables == (
        {"a.json": dict.fromkeys(("256", "2048", "8192"), STOCK)} if has_tiles else {}
    )
