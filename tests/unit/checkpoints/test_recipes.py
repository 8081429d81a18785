"""Each recipe runs: a few steps of every stage, one after the other as the scripts have them."""

import functools
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, Qwen3ForCausalLM

from checkpoints.recipes import match_heads
from checkpoints.recipes.run_log import earlier_log
from tests.paths import CHECKPOINTS
from vllm_dllm.tools.drafter.reference import load_drafter

pytestmark = pytest.mark.slow

TEXT, TARGET = CHECKPOINTS / "diffusiongemma-tiny", CHECKPOINTS / "qwen3-tiny-target"
Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the program of a module in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(module: str, *arguments: object) -> None:
        monkeypatch.setattr("sys.argv", [module, *map(str, arguments)])
        import_module(f"checkpoints.recipes.{module}").main()

    return run


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def test_train(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.sh`, and the mean of two stages that the later recipes end with."""
    few = functools.partial(match_heads.matching_rows, num_batches=4)
    monkeypatch.setattr(match_heads, "matching_rows", few)
    short = ("--minutes", 0.005, "--log-every", 1, "--processes", 1, "--no-compile")
    run("train", "--out", "1", *short)
    run("match_heads", "1", "2")
    run("train", "--init-from", "2", "--out", "3", "--lookups", "--keep-heads", *short)
    assert [entry["stage"] for entry in earlier_log(Path("3"))] == [1, 2]
    model = DiffusionGemmaForBlockDiffusion.from_pretrained("3")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained("3").eos_token == "<turn|>"
    run("average", "2", "3", "--share", 0.6, "--out", "mean")
    first, second, mean = map(weights, ("2", "3", "mean"))
    name = "model.decoder.layers.0.self_attn.q_proj.weight"
    assert torch.equal(mean[name], first[name].float().lerp(second[name].float(), 0.6).bfloat16())


def test_train_tools(run: Run) -> None:
    short = ("--minutes", 0.005, "--log-every", 1, "--processes", 1, "--no-compile")
    run("train", "--init-from", TEXT, "--out", "1", "--keep-heads", "--calls", "first", *short)
    assert "<|tool_call>" in AutoTokenizer.from_pretrained("1").get_vocab()


def test_train_seeing(run: Run) -> None:
    run("images.train_tower", "--init-from", TEXT, "--out", "1", "--state", "1.pt", "--steps", 2)
    short = ("--steps", 2, "--images", 4, "--tokens-per-batch", 1100, "--log-every", 1)
    run("images.train", "--init-from", "1", "--out", "2", "--state", "2.pt", *short)
    state = torch.load("2.pt", weights_only=True)
    assert [entry["step"] for entry in state["entries"]] == [1, 2]
    run("images.train", "--init-from", "1", "--out", "2", "--state", "2.pt", *short)  # goes on
    assert any("vision_tower" in name for name in weights("2"))


def test_train_drafter(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("train_target", "--out", "target", "--minutes", 0.005, "--log-every", 1)
    assert Qwen3ForCausalLM.from_pretrained("target").dtype == torch.bfloat16
    capsys.readouterr()
    run("drafter.prompts", "--count", 3)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(row) for row in rows] == [["task", "messages"]] * 3
    drafter = CHECKPOINTS / "qwen3-tiny-dflash"
    assert load_drafter(drafter).config.block_size == 16
    run("drafter.evaluate", TARGET, drafter, CHECKPOINTS / "held_out.jsonl", "--every", 100)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["summary"]["all"]["exact_match"] == 1 and found["summary"]["all"]["tau"] > 4


def test_train_masked(run: Run) -> None:
    short = ("--steps", 2, "--tokens", 512, "--log-every", 1)
    run("train_masked", "--init-from", TARGET, "--out", "1", *short)
    assert [entry["step"] for entry in earlier_log(Path("1"))] == [1, 2]
    config = json.loads(Path("1", "config.json").read_text())
    assert config["architectures"] == ["SDARForCausalLM"]
    assert (config["block_size"], config["mask_token_id"]) == (4, 497)


def test_exact_match(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("exact_match", TEXT, CHECKPOINTS / "held_out.jsonl", "--every", 100, "--dtype", "float32")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]["all"]["rows"] == 6
