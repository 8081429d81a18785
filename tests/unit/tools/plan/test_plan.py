"""What `vllm-dllm plan` computes, held against vLLM's own sizes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

from bench import dummy_checkpoint
from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.paths import CHECKPOINTS
from vllm_dllm import cli
from vllm_dllm.quantization.weight_files import read_shards
from vllm_dllm.tools.plan import GPUS, capacity
from vllm_dllm.tools.plan.capacity import Layer, read_shape

TINY = CHECKPOINTS / "diffusiongemma-tiny"


@pytest.fixture(scope="module")
def folder_26b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of the 26B model, and one weight of 1 KiB."""
    folder = tmp_path_factory.mktemp("26B")
    dummy_checkpoint.write(folder, "26B", "bf16", num_steps=16)
    save_file({"some.weight": torch.zeros(512, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


def test_26b_by_hand(folder_26b: Path) -> None:
    shape = read_shape(folder_26b)
    assert shape.weight_bytes == 1024
    assert shape.state_bytes() == 256 * 2816 * 2
    # A token: 5 full layers of 2 heads of 512, 25 sliding ones of 8 heads of 256, keys and values.
    # On 4 ranks, 2 heads of sliding layers on each, and of the 2 of full layers a copy of one.
    full, sliding = 5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2
    for dtype, bytes_of_bf16 in ((torch.bfloat16, 1), (torch.uint8, 2)):
        for ranks, heads, other in ((1, full, sliding), (4, full // 2, sliding // 4)):
            # Sliding layers keep a window of 1024, but for the row's own token, and the canvas; its
            # first token may be the last of a block.
            for context, kept in ((1, 16 + 16), (1000, 1008 + 16), (8192, 1279 + 1 + 16)):
                tokens = -(-context // 16) * 16
                expected = (tokens * heads + kept * other) // bytes_of_bf16
                assert shape.kv_bytes(context, dtype, ranks) == expected


def test_masked_models(tmp_path: Path) -> None:
    config = dict(
        model_type="sdar",
        block_size=4,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=3,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)
    assert shape.layers == (Layer(2, 16, None),) * 3
    assert shape.canvas_length == 4


def test_quantised_weights_are_counted_as_they_are_stored() -> None:
    folder = CHECKPOINTS / "diffusiongemma-tiny-FP8-dynamic"
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    headers = 100_000  # at most
    assert on_disk - headers < read_shape(folder).weight_bytes <= on_disk


def test_a_vision_tower_counts_where_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where no image can be prepared for it, nor where none is served."""
    seeing, blind, text = (
        make_tiny_checkpoint(tmp_path / name, **options)
        for name, options in (
            ("seeing", {"sees": True}),
            ("blind", {"sees": True}),
            ("text", {"sees": True, "vision": False}),
        )
    )
    for file in blind.glob("*processor_config.json"):
        file.unlink()
    tower = sum(
        tensor.num_bytes
        for shard in read_shards(seeing).values()
        for name, tensor in shard.items()
        if "vision" in name
    )
    alone = read_shape(text).weight_bytes
    assert read_shape(seeing).weight_bytes == read_shape(seeing, 2).weight_bytes == alone + tower
    assert read_shape(blind).weight_bytes == read_shape(seeing, 0).weight_bytes == alone
    for limits in ("{}", '{"image": 0, "video": 1}', '{"image": 0}'):
        options = ["--gpu", "h200", "--limit-mm-per-prompt", limits]
        assert cli.main(["plan", str(seeing), *options]) == 0
    whole, for_videos, less = capsys.readouterr().out.split("used by vLLM")[1:]
    assert whole == for_videos != less


def test_requests_that_fit(folder_26b: Path) -> None:
    """Their memory does, and one more's would not."""
    found = capacity.make_plan(folder_26b, 80, context=8192, ranks=1, kv_cache_dtype="auto")
    each = found.kv + found.state
    taken = found.weights + capacity.WORKSPACE + capacity.SAMPLING
    assert taken + found.max_requests * each <= found.memory
    assert taken + (found.max_requests + 1) * each > found.memory
    fp8 = capacity.make_plan(folder_26b, 80, context=8192, ranks=1, kv_cache_dtype="fp8")
    assert fp8.kv * 2 == found.kv


def test_command(folder_26b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(folder_26b), "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "one h200, 8,192 tokens of context per request" in printed
    assert "keys and values   413.1 MiB" in printed
    assert "denoises 24 canvases" in printed
    assert "1,288 tokens per second" in printed
    assert "at most" not in printed
    assert cli.main(["plan", str(TINY), "--gpu", "h200", "--context", "1000000"]) == 0
    printed = capsys.readouterr().out
    assert "the model is for 4,096 tokens at most (max_position_embeddings in its" in printed
    assert "vLLM refuses --max-model-len 1000000" in printed


@pytest.mark.parametrize("gpu", GPUS)
def test_a_step_has_as_many_tokens_as_vllm_gives_it(
    folder_26b: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    memory = int(GPUS[gpu].memory_gib * capacity.GIB)
    stand_in = SimpleNamespace(
        get_device_total_memory=lambda: memory,
        get_device_name=lambda: f"NVIDIA {gpu.upper()}",
        is_device_capability=lambda _: False,  # of a DGX Spark
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", stand_in)
    budgets, _ = arg_utils.EngineArgs.get_batch_defaults(world_size=1)
    assert cli.main(["plan", str(folder_26b), "--gpu", gpu]) == 0
    tokens = budgets[UsageContext.OPENAI_API_SERVER]
    canvases = (tokens - tokens // 4) // 256
    assert f"A step of {tokens:,} tokens denoises {canvases} canvases" in capsys.readouterr().out


def test_ranks_that_vllm_refuses_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for ranks in ("3", "2"):
        assert cli.main(["plan", str(TINY), "--gpu", "h200", "--tensor-parallel-size", ranks]) == 0
    three, two = capsys.readouterr().out.split("each of 2 h200")
    refusal = "3 GPUs cannot share the 4 heads of its attention evenly: vLLM refuses"
    assert refusal in three and "heads" not in two


def test_only_what_is_published_is_said(
    folder_26b: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, gpu in ((TINY, "h200"), (folder_26b, "a100")):
        assert cli.main(["plan", str(folder), "--gpu", gpu, "--tensor-parallel-size", "2"]) == 0
        printed = capsys.readouterr().out
        assert f"each of 2 {gpu}" in printed
        assert "ublished" not in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "does not exist: expected the folder of a checkpoint"),
        ([str(TINY), "--context", "0"], "--context must be at least 1, got 0"),
        ([str(TINY), "--tensor-parallel-size", "0"], "--tensor-parallel-size must be at least 1"),
        ([str(TINY), "--memory-gib", "3"], "raise --tensor-parallel-size, or quantise"),
        ([str(TINY), "--memory-gib", "0"], "--memory-gib must be a finite number above 0, got 0.0"),
        ([str(CHECKPOINTS / "qwen3-tiny-target")], "names no canvas_length"),
    ],
)
def test_what_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert cli.main(["plan", *arguments, "--gpu", "h100"]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "nosuch"}, "model type `nosuch`"),
        ({"model_type": "qwen3", "num_hidden_layers": "4"}, "'num_hidden_layers' expected int"),
    ],
)
def test_a_config_that_transformers_cannot_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: object, complaint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(tmp_path), "--gpu", "h100"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json is not what transformers expects" in line and complaint in line
