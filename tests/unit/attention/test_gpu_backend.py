"""The GPU backend: vLLM's cache layout and metadata reach the kernel as the definition has them.

Without a GPU the kernel runs in Triton's interpreter; what vLLM calls around it is real.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import vllm_dllm.attention.gpu
from attention_kernels import reference
from attention_kernels.api import FP8
from attention_kernels.fa4 import import_fa4
from attention_kernels.testing import PagedBatch, Request, allowed
from tests.triton_version import interpreted_without_gpu
from vllm_dllm import plugin, serving_config
from vllm_dllm.attention import WindowRules, gpu_backend, use_window_rules
from vllm_dllm.attention.gpu import GpuCanvasBackend, runs_fa4

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    interpreted_without_gpu()


REQUESTS = [
    Request(8, 37),
    Request(8, 37, symmetric=True),
    Request(8, 30, causal=True),
    Request(6, 0, causal=True),
]
HQ, HKV, D, PAGE, WINDOW = 4, 2, 32, 16, 12


def metadata(batch: PagedBatch):
    builder = GpuCanvasBackend.get_builder_cls()(None, [], None, torch.device("cpu"))
    common = CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=len(batch.query),
        max_query_len=8,
        max_seq_len=1024,
        block_table_tensor=batch.block_table,
        slot_mapping=torch.zeros(len(batch.query), dtype=torch.int64),
        causal=batch.causal,
    )
    return builder.build(0, common, window_rules=WindowRules(batch.symmetric, batch.spans))


def engine_layout(batch: PagedBatch) -> torch.Tensor:
    """[num_blocks, Hkv, block_size, 2 * D], keys beside values, as vLLM allocates it."""
    return torch.cat((batch.key_cache, batch.value_cache), dim=-1).transpose(1, 2).contiguous()


def attend(
    batch: PagedBatch, kv_cache: torch.Tensor, cache_dtype: str = "auto", of_step: Any = None
) -> torch.Tensor:
    impl = GpuCanvasBackend.get_impl_cls()(HQ, D, 0.3, HKV, None, WINDOW, cache_dtype)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    padding = torch.full((5, HQ, D), torch.nan, dtype=batch.query.dtype)
    query = torch.cat((batch.query, padding))
    output = torch.full_like(query, torch.nan)
    impl.forward(layer, query, query, query, kv_cache, of_step or metadata(batch), output)
    assert output[len(batch.query) :].isnan().all(), "written to the padding of a CUDA graph"
    return output[: len(batch.query)]


def random_batch(dtype: torch.dtype, requests: list[Request] = REQUESTS) -> PagedBatch:
    return PagedBatch.random(
        requests, num_heads=HQ, num_kv_heads=HKV, head_size=D, block_size=PAGE, dtype=dtype
    )


def test_engine_layout() -> None:
    batch = random_batch(torch.float32)
    output = attend(batch, engine_layout(batch))
    allowed(batch, scale=0.3, window_left=WINDOW - 1).check(output)


WITH_IMAGES = [*REQUESTS, Request(40, 7, causal=True, images=((7, 12), (15, 40)))]


def test_images() -> None:
    batch = random_batch(torch.float32, WITH_IMAGES)
    output = attend(batch, engine_layout(batch))
    allowed(batch, scale=0.3, window_left=WINDOW - 1).check(output)


def test_fp8_cache() -> None:
    batch = random_batch(torch.float16)
    kv_cache = engine_layout(batch).to(FP8)
    coarse = PagedBatch(
        **vars(batch)
        | {"key_cache": batch.key_cache.to(FP8), "value_cache": batch.value_cache.to(FP8)}
    )
    # vLLM allocates an fp8 cache as bytes.
    output = attend(batch, kv_cache.view(torch.uint8), "fp8")
    scales = {"key_scale": torch.tensor([0.5]), "value_scale": torch.tensor([2.0])}
    allowed(coarse, scale=0.3, window_left=WINDOW - 1, **scales).check(output)


def test_offers_what_the_26b_model_asks_for() -> None:
    for head_size, has_window in ((256, True), (512, False)):
        for kv_cache_dtype in ("auto", "fp8"):
            reasons = GpuCanvasBackend.validate_configuration(
                head_size=head_size,
                dtype=torch.bfloat16,
                kv_cache_dtype=kv_cache_dtype,
                block_size=None,
                use_mla=False,
                has_sink=False,
                use_sparse=False,
                use_mm_prefix=True,
                use_per_head_quant_scales=False,
                device_capability=DeviceCapability(9, 0),
                attn_type="decoder",
                has_sliding_window=has_window,
                use_non_causal=True,
            )
            assert not reasons
    builder = GpuCanvasBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.ALWAYS


def config(cache_dtype: str = "auto") -> VllmConfig:
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype))  # type: ignore[return-value]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[str]]:
    """Pretends that there is a GPU of this capability; collects the warnings of our attention."""
    plugin.register()
    warnings: list[str] = []
    monkeypatch.setattr(
        vllm_dllm.attention.logger, "warning_once", lambda text, *args: warnings.append(text % args)
    )

    def pretend(major: int, minor: int) -> list[str]:
        platform = SimpleNamespace(
            is_cpu=lambda: False,
            is_cuda=lambda: True,
            get_device_capability=lambda: DeviceCapability(major, minor),
        )
        monkeypatch.setattr(vllm_dllm.attention, "current_platform", platform)
        return warnings

    return pretend


def test_default_where_it_can_serve(gpu: Callable[[int, int], list[str]]) -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        gpu(*capability)
        assert gpu_backend(config()) is AttentionBackendEnum.CUSTOM
        assert gpu_backend(config("fp8")) is AttentionBackendEnum.CUSTOM
        assert gpu_backend(config("fp8_e5m2")) is None
    gpu(8, 0)
    assert gpu_backend(config()) is AttentionBackendEnum.CUSTOM
    assert gpu_backend(config("fp8")) is None
    gpu(7, 5)
    assert gpu_backend(config()) is None
    assert AttentionBackendEnum.CUSTOM.get_class() is GpuCanvasBackend


def test_a_stock_backend_is_served_with_a_warning(gpu: Callable[[int, int], list[str]]) -> None:
    warnings = gpu(9, 0)
    with use_window_rules(AttentionConfig(backend=AttentionBackendEnum.CUSTOM)):
        pass
    assert warnings == []
    with use_window_rules(AttentionConfig(backend=AttentionBackendEnum.TRITON_ATTN)):
        pass
    (warning,) = warnings
    assert "attention backend TRITON_ATTN, which only knows the window rule 'symmetric'" in warning
    assert "|q-k| < window" in warning and "decoded differently from the reference" in warning


def test_another_extension_keeps_the_name(gpu: Callable[[int, int], list[str]]) -> None:
    gpu(9, 0)
    custom, theirs = AttentionBackendEnum.CUSTOM, "vllm.v1.attention.backends.theirs.Backend"
    custom.clear_override()
    try:
        register_backend(custom, theirs)
        plugin.register()
        assert custom.get_path() == theirs and gpu_backend(config()) is None
    finally:
        custom.clear_override()
        plugin.register()
    assert gpu_backend(config()) is custom


@pytest.mark.parametrize("requests", [REQUESTS, WITH_IMAGES], ids=["text", "images"])
def test_dispatch_to_flash_attention_4(
    monkeypatch: pytest.MonkeyPatch, requests: list[Request]
) -> None:
    """A stand-in for it takes what the backend hands over; its chunks reach the next layer."""
    handed_on: list[object] = []

    def fa4(*arguments: torch.Tensor, chunks: object, **options: Any) -> object:
        handed_on.append(chunks)
        reference.attention(*arguments, **options)
        return "chunks of this step"

    monkeypatch.setattr(vllm_dllm.attention.gpu, "runs_fa4", lambda *_: True)
    stand_in = SimpleNamespace(attention=fa4)
    monkeypatch.setattr(vllm_dllm.attention.gpu, "import_fa4", lambda: stand_in)
    batch = random_batch(torch.float32, requests)
    of_step = metadata(batch)
    right = allowed(batch, scale=0.3, window_left=WINDOW - 1)
    for _ in range(2):
        right.check(attend(batch, engine_layout(batch), of_step=of_step))
    assert handed_on == [None, "chunks of this step"]


def test_a_kernel_a_layer_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 where it was asked for and can serve, Triton in the other layers."""
    log: list[str] = []
    monkeypatch.setattr(
        vllm_dllm.attention.gpu.logger, "info_once", lambda text, *args: log.append(text % args)
    )

    def runs(version: int | None, head_size: int, cache: str = "auto", chip=(9, 0)) -> bool:
        config = SimpleNamespace(
            attention_config=AttentionConfig(flash_attn_version=version),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        monkeypatch.setattr(
            vllm_dllm.attention.gpu, "get_current_vllm_config_or_none", lambda: config
        )
        platform = SimpleNamespace(get_device_capability=lambda: DeviceCapability(*chip))
        monkeypatch.setattr(vllm_dllm.attention.gpu, "current_platform", platform)
        return runs_fa4(head_size, cache)

    assert not runs(None, 256) and not runs(3, 256)
    assert all("256 run our Triton kernel" in line and "not asked for" in line for line in log)
    assert runs(4, 256) and "Layers of head size 256 run FlashAttention-4" in log[-1]
    assert not runs(4, 512) and "head size 512 run our Triton kernel" in log[-1]
    assert "got query with 512" in log[-1]
    assert not runs(4, 256, cache="fp8") and "a key_cache of the query's dtype" in log[-1]
    assert not runs(4, 256, cache="float16") and "got torch.float16" in log[-1]
    assert not runs(4, 256, chip=(8, 0)) and "got sm_80" in log[-1]


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attention_kernels.fa4_fwd", None)
    with pytest.raises(ImportError, match=r"flash-attn-4 .*pip install 'vllm-dllm\[fa4\]'"):
        import_fa4()


Serve = Callable[[AttentionConfig], list[str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Starts a server on a GPU that ours can serve, as far as attention goes; what it logs."""
    log: list[str] = []
    monkeypatch.setattr(serving_config.logger, "info", lambda text, *args: log.append(text % args))

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
    for name in (
        "use_our_classes",
        "check_token_budget",
        "read_denoise_config",
        "default_max_num_seqs",
        "choose_steps",
        "finish",
    ):
        monkeypatch.setattr(serving_config, name, lambda *_: 8)

    def start(attention_config: AttentionConfig) -> list[str]:
        config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=None, supports_multimodal_inputs=False),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
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
    assert "Triton, or with --attention-config.flash_attn_version 4 FlashAttention-4" in line


def test_the_log_claims_no_choice_of_the_users(serve: Serve) -> None:
    attention_config = AttentionConfig(backend=AttentionBackendEnum.TRITON_ATTN)
    assert serve(attention_config) == []
    assert attention_config.backend is AttentionBackendEnum.TRITON_ATTN
