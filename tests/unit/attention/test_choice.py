"""Which attention a server on a GPU chooses: what the shipped times say, what it measures, how
times decide, and what its log says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import vllm_dllm.attention.flash_attention
import vllm_dllm.attention.gpu
from tests.triton_version import interpreted_without_gpu
from tests.unit.attention.test_gpu_backend import StandIn
from vllm_dllm import serving_config
from vllm_dllm.attention import measure as measuring
from vllm_dllm.attention.ahead import Compiler
from vllm_dllm.attention.choice import Choice, LayerKind, Times
from vllm_dllm.attention.flash_attention import FlashAttention
from vllm_dllm.attention.gpu import GpuCanvasBackend, choose_versions
from vllm_dllm.measured import folder
from vllm_dllm.measured.stopwatch import Stopwatch

SLIDING, FULL = LayerKind(256, 16, has_window=True), LayerKind(512, 16, has_window=False)
CANVAS = 256
LONG = 262_144


def hopper() -> Times:
    times = Times.shipped((9, 0))
    assert times is not None and times.gpu == "NVIDIA H200"
    return times


def chosen(layer: LayerKind, longest: int = LONG, times: Times | None = None) -> Choice:
    choice = (times or hopper()).choose(layer, longest)
    assert choice is not None
    return choice


def test_the_26b_model_on_hopper() -> None:
    for layer in (FULL, SLIDING, SLIDING._replace(num_heads=8)):
        assert chosen(layer) == Choice(((0, "fa4"),)), str(chosen(layer))
    assert str(chosen(FULL)) == "FlashAttention-4"


def test_a_rank_with_fewer_heads_has_less_work_a_row() -> None:
    own = times((256, 0, 1, 2), (1024, 0, 2, 1))
    assert chosen(SLIDING, times=own).steps == ((0, "triton"), (512, "fa4"))
    halved = SLIDING._replace(num_heads=8)
    assert chosen(halved, times=own).steps == ((0, "triton"), (1024, "fa4"))


def test_contexts_that_a_server_does_not_allow_say_nothing() -> None:
    own = times((256, 0, 2, 1), (256, 1024, 1, 3))
    assert chosen(SLIDING, 1000, own).version_for(CANVAS) == "fa4"
    assert chosen(SLIDING, 1024, own).version_for(CANVAS) == "triton"


@pytest.mark.parametrize(
    "layer",
    [SLIDING._replace(has_window=False), FULL._replace(has_window=True), LayerKind(128, 32, 0)],
)
def test_other_layers_and_chips_are_unknown(layer: LayerKind) -> None:
    assert hopper().choose(layer, LONG) is None
    for capability in ((8, 0), (10, 0), (12, 0)):
        assert Times.shipped(capability) is None


def times(*cells: tuple[int, int, float, float]) -> Times:
    measured = [dict(rows=r, context=c, triton=t, fa4=f) for r, c, t, f in cells]
    return Times("a GPU", [{"head_size": 256, "has_window": True, "num_heads": 16, "ms": measured}])


TABLES: dict[str, tuple[list[tuple[int, int, float, float]], tuple[tuple[int, str], ...]]] = {
    "the faster": ([(256, 0, 2, 1)], ((0, "fa4"),)),
    "equals": ([(256, 0, 1.01, 1)], ((0, "triton"),)),
    "no longer equals": ([(256, 0, 1.03, 1)], ((0, "fa4"),)),
    "of two that take turns, the one that loses less": (
        [(256, 0, 1, 1.3), (256, 1024, 1.2, 1)],
        ((0, "triton"),),
    ),
    "from half of what was measured": (
        [(256, 0, 1, 2), (1024, 0, 2, 1), (4096, 0, 2, 1), (8192, 0, 1, 2)],
        ((0, "triton"), (512, "fa4"), (4096, "triton")),
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_times_decide(table: str) -> None:
    cells, expected = TABLES[table]
    assert chosen(SLIDING, times=times(*cells)).steps == expected


def test_what_a_server_measures_is_read_the_same_way() -> None:
    layer: dict[str, Any] = {"head_size": 512, "has_window": False, "num_heads": 16}
    layer["ms"] = [{"rows": 256, "context": 0, "triton": 1.0, "fa4": 2.0}]
    own = Times("another", [layer])
    assert own.gpu == "another" and own.choose(FULL, LONG) == Choice(((0, "triton"),))
    assert own.choose(SLIDING, LONG) is None
    layer["ms"] = [{"rows": 256, "context": 0, "fa4": 2.0}, {"rows": 512, "context": 0, "fa4": 2.0}]
    assert Times("x", [layer]).choose(FULL, LONG) == Choice(((0, "fa4"),))


HQ, HKV, D, PAGE, SMALL_CANVAS = 4, 2, 32, 16, 8
TRITON = Choice(((0, "triton"),))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    interpreted_without_gpu()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """FlashAttention-4 for layers without a window; others have Triton alone."""
    stand_in = StandIn()
    attention = FlashAttention(stand_in, has_flags=True, has_masks=False)
    monkeypatch.setattr(vllm_dllm.attention.gpu, "choose_versions", lambda *_: (TRITON, None))
    monkeypatch.setattr(
        FlashAttention,
        "find",
        lambda kind, *_: "it takes no window" if kind.has_window else attention,
    )
    monkeypatch.setattr(measuring, "CONTEXTS", (0, 16, 64, 500))
    return stand_in


def layer(window: int | None) -> Any:
    return SimpleNamespace(
        impl=GpuCanvasBackend.get_impl_cls()(HQ, D, 0.3, HKV, None, window, "auto"),
        kv_cache=torch.zeros(6, HKV, PAGE, 2 * D),
    )


def measure(layers: list[Any], stand_in: StandIn, longest: int = 80) -> list[dict[str, Any]]:
    def clock(run: Any) -> float:
        stand_in.calls.clear()
        rows = len(run())
        return rows if stand_in.calls else 20.0

    return measuring.measure_attention(
        layers, torch.float32, SMALL_CANVAS, (1, 3), longest, Stopwatch(clock)
    )


def test_times_of_each_kind_by_rows_and_context(stand_in: StandIn) -> None:
    """What `Times` reads; the layers choose as before, and their caches are as empty."""
    layers = [layer(12), layer(None), layer(None), SimpleNamespace()]
    measured = measure(layers, stand_in)
    cells = [
        {"rows": rows, "context": context, "triton": 20.0, "fa4": rows}
        for rows in (8, 24)
        for context in (0, 16, 64)
    ]
    assert measured == [{"head_size": D, "num_heads": HQ, "has_window": False, "ms": cells}]
    kind = layers[1].impl.kind
    choice = Times("this", measured).choose(kind, 80)
    assert choice == Choice(((0, "fa4"), (12, "triton")))
    assert measuring.describe_gains(measured) == [
        f"FlashAttention-4 at head size {D} 0.83 to 2.50 times as fast as Triton"
    ]
    assert layers[1].impl.choice == TRITON and not layers[1].kv_cache.any()


def test_a_wrong_version_gets_no_time(stand_in: StandIn) -> None:
    stand_in.attend = lambda out, **_: out.fill_(1)  # type: ignore[method-assign]
    one = layer(None)
    (measured,) = measure([one], stand_in)
    assert all("fa4" not in cell for cell in measured["ms"])
    assert measuring.describe_gains([measured]) == []
    choice = Times("this", [measured]).choose(one.impl.kind, 80)
    assert choice == TRITON


def test_nothing_longer_than_a_request(stand_in: StandIn) -> None:
    (measured,) = measure([layer(None)], stand_in, longest=30)
    assert {cell["context"] for cell in measured["ms"]} == {0, 16}


Chosen = Callable[..., tuple[str, bool]]


@pytest.fixture
def said_of(monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]) -> Chosen:
    """What the log says of a kind of layer, and whether FlashAttention-4 is part of it."""
    log = logged(vllm_dllm.attention.gpu, "info_once")

    def choose(
        layer: LayerKind, version: int | None = None, cache: str = "auto", chip: Any = (9, 0)
    ) -> tuple[str, bool]:
        config = SimpleNamespace(
            attention_config=AttentionConfig(flash_attn_version=version),
            model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=32768),
            additional_config={},
        )
        gpu, flash_attention = vllm_dllm.attention.gpu, vllm_dllm.attention.flash_attention
        monkeypatch.setattr(gpu, "get_current_vllm_config_or_none", lambda: config)
        platform = SimpleNamespace(get_device_capability=lambda: DeviceCapability(*chip))
        monkeypatch.setattr(gpu, "current_platform", platform)
        monkeypatch.setattr(flash_attention, "current_platform", platform)
        choice, attention = choose_versions(layer, cache)
        assert (attention is None) == (choice == Choice(((0, "triton"),)))
        return log[-1], attention is not None

    return choose


@pytest.mark.fa4
def test_a_line_of_the_log_for_each_kind_of_layer(
    monkeypatch: pytest.MonkeyPatch, said_of: Chosen
) -> None:
    module = vllm_dllm.attention.flash_attention
    monkeypatch.setattr(module, "flash_attention_4", lambda: lambda **_: None)
    assert said_of(SLIDING) == (
        "Attention layers of head size 256 with a window run FlashAttention-4 (measured on an "
        "NVIDIA H200).",
        True,
    )
    line, has_fa4 = said_of(FULL)
    assert "512 without a window run FlashAttention-4 (measured" in line and has_fa4
    line, has_fa4 = said_of(SLIDING, version=4)
    assert "run FlashAttention-4 (--attention-config.flash_attn_version 4)" in line and has_fa4
    for choose, why in (
        (lambda: said_of(SLIDING, version=3), "asks for no FlashAttention-4"),
        (lambda: said_of(FULL, cache="fp8"), "it takes a key_cache of the query's dtype"),
        (lambda: said_of(FULL, cache="float16"), "got torch.float16"),
        (lambda: said_of(FULL._replace(has_window=True), version=4), "got query with 512"),
        (lambda: said_of(FULL, chip=(10, 0)), "no measured times"),
        (lambda: said_of(FULL, version=4, chip=(10, 0)), "got query with 512"),
        (lambda: said_of(SLIDING, version=4, chip=(8, 0)), "got sm_80"),
    ):
        line, has_fa4 = choose()
        assert "run Triton (" in line and why in line and not has_fa4


@pytest.mark.fa4
def test_a_build_without_flash_attention_4_runs_triton(said_of: Chosen) -> None:
    """As the CPU's."""
    line, has_fa4 = said_of(FULL)
    assert "run Triton (not FlashAttention-4: it is not there: " in line and not has_fa4


Serve = Callable[[AttentionConfig], list[str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]) -> Serve:
    """Starts a server on a GPU that ours can serve, as far as attention goes; what it logs."""
    log = logged(serving_config, "info")

    def stock(vllm_config: Any) -> None:
        vllm_config.attention_config.flash_attn_version = 4

    monkeypatch.setattr(
        serving_config.DiffusionGemmaModelForBlockDiffusionConfig,
        "verify_and_update_config",
        staticmethod(stock),
    )
    monkeypatch.setattr(serving_config, "gpu_backend", lambda _: AttentionBackendEnum.CUSTOM)
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setattr(serving_config, "current_platform", gpu)
    for owner, name in (
        (serving_config, "fill_in_canvas_length"),
        (serving_config, "set_scheduler_and_worker"),
        (serving_config, "limit_prompt_chunks"),
        (serving_config.checks, "check_use"),
        (serving_config.checks, "check_token_budget"),
        (serving_config.checks, "check_overrides"),
        (serving_config, "read_denoise_config"),
        (serving_config.sizes, "default_max_num_seqs"),
        (serving_config.sizes, "choose_capture_sizes"),
        (serving_config.sizes, "log_capacity"),
        (serving_config, "finish_config"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: 8)

    def start(attention_config: AttentionConfig) -> list[str]:
        config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=None, supports_multimodal_inputs=False),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            attention_config=attention_config,
            additional_config={},
        )
        serving_config.DiffusionGemmaServingConfig.verify_and_update_config(config)
        return log

    return start


@pytest.mark.parametrize("version", [None, 4])
def test_only_a_user_asks_for_flash_attention_4(serve: Serve, version: int | None) -> None:
    """Stock vLLM sets version 4 by itself for models whose layers differ in head size."""
    attention_config = AttentionConfig(flash_attn_version=version)
    serve(attention_config)
    assert attention_config.backend is AttentionBackendEnum.CUSTOM
    assert attention_config.flash_attn_version == version


def test_the_log_says_which_attention_was_chosen(serve: Serve) -> None:
    (line,) = serve(AttentionConfig())
    assert line.startswith("Attention runs our kernels (--attention-backend CUSTOM)")


def test_the_log_claims_no_choice_of_the_users(serve: Serve) -> None:
    attention_config = AttentionConfig(backend=AttentionBackendEnum.TRITON_ATTN)
    assert serve(attention_config) == []
    assert attention_config.backend is AttentionBackendEnum.TRITON_ATTN


def test_kernel_choice_says_whose_times_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`measured` takes what is shipped until something has been measured."""
    gpu = vllm_dllm.attention.gpu
    platform = SimpleNamespace(get_device_capability=lambda: DeviceCapability(9, 0))
    monkeypatch.setattr(gpu, "current_platform", platform)
    monkeypatch.setattr(folder, "result_folder", lambda _: tmp_path)

    def known(choice: str) -> list[str]:
        section = {"vllm_dllm": {"kernel_choice": choice}}
        found = gpu.load_times(SimpleNamespace(additional_config=section))
        return [times.gpu for times in found]

    assert (known("stock"), known("shipped"), known("measured")) == ([], *2 * [["NVIDIA H200"]])
    folder.write_json(tmp_path, folder.RESULT, {"gpu": "this GPU", "layers": []})
    assert (known("stock"), known("shipped")) == ([], ["NVIDIA H200"])
    assert known("measured") == ["this GPU", "NVIDIA H200"], "of kinds that it did not get to"


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_kept_if_all_were_compiled(tmp_path: Path, fails: bool) -> None:
    kept, partial = tmp_path / "kept", tmp_path / "partial"
    (partial / "fwd").mkdir(parents=True)
    (partial / "fwd" / "kernel.o").write_bytes(b"code")
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({int(fails)})"])
    compiler = Compiler(process, partial, kept, done=kept / "these.done")
    for _ in range(2):  # before graphs are measured, and before kernels are warmed up
        compiler.wait()
    assert compiler.done.exists() == (kept / "fwd" / "kernel.o").exists() == (not fails)
    assert not partial.exists()
