"""Kernels are measured once for all starts on a machine, by the first rank, for all ranks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dllm.config import tiles
from vllm_dllm.config.tiles import VARIABLE, shipped_block_sizes
from vllm_dllm.measured import folder
from vllm_dllm.step.runner import kernel_choice
from vllm_dllm.step.runner.kernel_choice import choose_kernels

KIND = {"head_size": 512, "has_window": False, "num_heads": 16}
LAYERS = [{**KIND, "ms": [{"rows": 256, "context": 0, "triton": 2.0, "fa4": 1.0}]}]
TABLES = {"E=4,N=2.json": {"256": {"BLOCK_SIZE_M": 16}}}
OURS = {"E=4,N=2.json": {"256": 32, "2048": 0}}
LINEARS = {"8x16": {"256": "PyTorch", "2048": "CUTLASS"}}
(SHIPPED_FILE, *_) = shipped_block_sizes()
USED = {**shipped_block_sizes(), **OURS}
"""What was not measured stays as shipped."""


class Ranks:
    """One of several; what it is sent when the first one broadcasts."""

    def __init__(self, is_first_rank: bool = True, sent: Any = None) -> None:
        self.is_first_rank, self.sent = is_first_rank, sent

    def broadcast_object(self, found: Any) -> Any:
        return found if self.is_first_rank else self.sent


class Start:
    """Of one process of a server."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.timed, self.forgot, self.used = path, [], 0, []
        self.linears: Any = None
        self.config = SimpleNamespace(
            additional_config={"vllm_dllm": {"kernel_choice": "measured"}},
            compilation_config=SimpleNamespace(static_forward_context={}),
            diffusion_config=SimpleNamespace(canvas_length=256),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
            attention_config=SimpleNamespace(flash_attn_version=None),
            kernel_config=SimpleNamespace(moe_backend="auto"),
            model_config=SimpleNamespace(
                architecture="DiffusionGemmaForBlockDiffusion", dtype=None, max_model_len=4096
            ),
        )
        self.patch = monkeypatch
        self.ranks(Ranks())
        monkeypatch.setenv(VARIABLE, str(path))
        for name, value in (
            ("current_platform", SimpleNamespace(get_device_name=lambda: "a GPU")),
            ("set_current_vllm_config", lambda _: torch.no_grad()),
            ("clear_tiles_cache", self.forget),
        ):
            monkeypatch.setattr(kernel_choice, name, value)
        monkeypatch.setattr(folder, "result_folder", lambda _: path)
        monkeypatch.setattr(kernel_choice.attention, "measure_attention", self.attention)
        monkeypatch.setattr(kernel_choice.expert_kernels, "measure_experts", self.tiles)
        monkeypatch.setattr(
            kernel_choice.expert_kernels, "install_kernels", lambda _, ours: self.used.append(ours)
        )
        monkeypatch.setattr(kernel_choice.fp8_linears, "measure_fp8_linears", self.fp8_linears)
        monkeypatch.setattr(
            kernel_choice.fp8_linears,
            "use_kernels",
            lambda linears: setattr(self, "linears", linears),
        )

    def ranks(self, ranks: Ranks) -> None:
        self.patch.setattr(kernel_choice, "get_tp_group", lambda: ranks)

    def forget(self) -> None:
        self.forgot += 1

    def attention(self, layers: Any, dtype: Any, length: int, steps: list[int], *_: Any) -> Any:
        self.timed.append(("attention", length, steps))
        return LAYERS

    def tiles(self, modules: Any, rows: list[int], stopwatch: Any) -> Any:
        self.timed.append(("tiles", rows))
        return TABLES, OURS, []

    def fp8_linears(self, modules: Any, dtype: Any, rows: list[int], stopwatch: Any) -> Any:
        self.timed.append(("FP8 linears", rows))
        return LINEARS, []

    def run(self) -> None:
        choose_kernels(self.config, torch.nn.Module())


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(tmp_path / "kernels", monkeypatch)


ROWS = [256, 2048]
FOUND = {
    "gpu": "a GPU",
    "layers": LAYERS,
    "rows": ROWS,
    "tiles": TABLES,
    "ours": OURS,
    "linears": LINEARS,
}


def test_the_second_start_measures_nothing(start: Start) -> None:
    start.run()
    timed = [("attention", 256, [1, 8]), ("tiles", [256, 2048]), ("FP8 linears", [256, 2048])]
    assert start.timed == timed and start.linears == LINEARS
    assert folder.read_result(start.path) == FOUND and start.forgot == 1
    assert (start.path / "E=4,N=2.json").exists(), "where vLLM looks for it"
    start.linears = None
    start.run()
    assert start.timed == timed and start.forgot == 1 and start.linears == LINEARS
    assert start.used == [USED, USED], "our experts compute in both"


def test_what_was_not_measured_stays_as_shipped(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers whose experts were timed with 256 rows alone. Nothing is shipped for the second:
    with other rows it runs vLLM's kernel."""
    shipped = tiles.shipped_tiles(SHIPPED_FILE)
    measured = {SHIPPED_FILE: {"256": {"BLOCK_SIZE_M": 16}}}
    found = measured, {SHIPPED_FILE: {"256": 0}, "other.json": {"256": 32}}, []
    monkeypatch.setattr(kernel_choice.expert_kernels, "measure_experts", lambda *_: found)
    start.run()
    sizes = shipped_block_sizes()[SHIPPED_FILE] | {"256": 0}
    expected = {SHIPPED_FILE: sizes, "other.json": {"256": 32, "2048": 0}}
    assert start.used == [shipped_block_sizes() | expected]
    kept = json.loads((start.path / SHIPPED_FILE).read_text())
    assert kept == shipped | measured[SHIPPED_FILE] and len(kept) > 3


@pytest.mark.parametrize(("choice", "used"), [("shipped", [shipped_block_sizes()]), ("stock", [])])
def test_nobody_else_measures(
    start: Start, monkeypatch: pytest.MonkeyPatch, choice: str, used: list[Any]
) -> None:
    monkeypatch.delenv(VARIABLE)
    start.config.additional_config = {"vllm_dllm": {"kernel_choice": choice}}
    start.run()
    assert start.timed == [] and start.used == used and not start.path.exists()
    assert start.linears is None


@pytest.mark.parametrize("choice", ["shipped", "measured"])
def test_batch_invariant_steps_keep_vllm_s_kernels(
    start: Start, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setattr(kernel_choice, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    start.config.additional_config = {"vllm_dllm": {"kernel_choice": choice}}
    start.run()
    assert start.timed == [] and start.used == [] and start.linears is None


def test_experts_that_the_user_chose_are_not_replaced(start: Start) -> None:
    """`VARIABLE` is the user's."""
    start.config.additional_config = {"vllm_dllm": {"kernel_choice": "shipped"}}
    start.run()
    assert start.used == []


def test_other_ranks_take_what_the_first_one_found(start: Start) -> None:
    start.ranks(Ranks(is_first_rank=False, sent=FOUND))
    start.run()
    assert start.timed == [] and folder.read_result(start.path) == FOUND and start.forgot == 1
    assert start.used == [USED] and start.linears == LINEARS


def test_what_the_user_chose_is_not_measured(start: Start, monkeypatch: Any) -> None:
    start.config.attention_config.flash_attn_version = 3
    monkeypatch.setenv(VARIABLE, "/of/the/user")
    start.run()
    assert start.timed == [("FP8 linears", [256, 2048])]


def test_blocks_of_masked_models_run_triton_alone(start: Start) -> None:
    start.config.model_config.architecture = "SDARForCausalLM"
    start.run()
    assert start.timed == [("tiles", [256, 2048]), ("FP8 linears", [256, 2048])]


def test_a_disk_that_takes_nothing_ends_no_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(folder, "write_json", full)
    start.run()
    assert start.timed and start.forgot == 0
    assert start.used == [shipped_block_sizes()], "which need no disk"
    assert start.linears == {}
