"""The GPU backend: vLLM's cache layout and metadata reach the kernel as the definition has them.

Without a GPU the kernel runs in Triton's interpreter; what vLLM calls around it is real.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import vllm_dllm.attention
from attention_kernels.api import FP8
from attention_kernels.testing import PagedBatch, Request, rms_ratio
from vllm_dllm import compat, plugin
from vllm_dllm.attention import WindowRules, gpu_backend, use_window_rules
from vllm_dllm.attention.triton import TritonCanvasBackend

pytestmark = pytest.mark.usefixtures("triton_version")

REQUESTS = [
    Request(8, 37),
    Request(8, 37, symmetric=True),
    Request(8, 30, causal=True),
    Request(6, 0, causal=True),
]
HQ, HKV, D, PAGE, WINDOW = 4, 2, 32, 16, 12


def metadata(batch: PagedBatch):
    builder = TritonCanvasBackend.get_builder_cls()(None, [], None, torch.device("cpu"))
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
    return builder.build(0, common, window_rules=WindowRules(batch.symmetric))


def engine_layout(batch: PagedBatch) -> torch.Tensor:
    """[num_blocks, Hkv, block_size, 2 * D], keys beside values, as vLLM allocates it."""
    return torch.cat((batch.key_cache, batch.value_cache), dim=-1).transpose(1, 2).contiguous()


def attend(batch: PagedBatch, kv_cache: torch.Tensor, cache_dtype: str = "auto") -> torch.Tensor:
    impl = TritonCanvasBackend.get_impl_cls()(HQ, D, 0.3, HKV, None, WINDOW, cache_dtype)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    padding = torch.full((5, HQ, D), torch.nan, dtype=batch.query.dtype)
    query = torch.cat((batch.query, padding))
    output = torch.full_like(query, torch.nan)
    impl.forward(layer, query, query, query, kv_cache, metadata(batch), output)
    assert output[len(batch.query) :].isnan().all(), "written to the padding of a CUDA graph"
    return output[: len(batch.query)]


def random_batch(dtype: torch.dtype) -> PagedBatch:
    return PagedBatch.random(
        REQUESTS, num_heads=HQ, num_kv_heads=HKV, head_size=D, block_size=PAGE, dtype=dtype
    )


def test_engine_layout() -> None:
    batch = random_batch(torch.float32)
    expected = batch.reference(torch.float64, scale=0.3, window_left=WINDOW - 1)
    assert rms_ratio(attend(batch, engine_layout(batch)), expected).max() < 1e-5


def test_fp8_cache() -> None:
    batch = random_batch(torch.float16)
    kv_cache = engine_layout(batch).to(FP8)
    coarse = PagedBatch(
        **vars(batch)
        | {"key_cache": batch.key_cache.to(FP8), "value_cache": batch.value_cache.to(FP8)}
    )
    expected = coarse.reference(
        torch.float64,
        scale=0.3,
        window_left=WINDOW - 1,
        key_scale=torch.tensor([0.5]),
        value_scale=torch.tensor([2.0]),
    )
    # vLLM allocates an fp8 cache as bytes.
    output = attend(batch, kv_cache.view(torch.uint8), "fp8")
    assert rms_ratio(output, expected).max() < 0.005


def test_offers_what_the_26b_model_asks_for() -> None:
    for head_size, has_window in ((256, True), (512, False)):
        for kv_cache_dtype in ("auto", "fp8"):
            reasons = TritonCanvasBackend.validate_configuration(
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
    builder = TritonCanvasBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.ALWAYS


def test_the_name_custom_is_ours_once_the_plugin_is_loaded() -> None:
    plugin.register()
    assert gpu_backend() is AttentionBackendEnum.CUSTOM
    assert AttentionBackendEnum.CUSTOM.get_class() is TritonCanvasBackend


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings that building the model's layers would print on a GPU."""
    warnings: list[str] = []
    monkeypatch.setattr(
        vllm_dllm.attention, "current_platform", SimpleNamespace(is_cpu=lambda: False)
    )
    monkeypatch.setattr(
        vllm_dllm.attention.logger, "warning_once", lambda text, *args: warnings.append(text % args)
    )
    return warnings


def test_a_stock_backend_is_served_with_a_warning(on_a_gpu: list[str]) -> None:
    with use_window_rules(AttentionConfig(backend=AttentionBackendEnum.CUSTOM)):
        pass
    assert on_a_gpu == []
    with use_window_rules(AttentionConfig(backend=AttentionBackendEnum.TRITON_ATTN)):
        pass
    assert len(on_a_gpu) == 1 and "TRITON_ATTN" in on_a_gpu[0] and "|q-k| < window" in on_a_gpu[0]


def test_another_extension_keeps_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = "theirs.Backend"
    monkeypatch.setattr(AttentionBackendEnum.CUSTOM, "is_overridden", lambda: True, raising=False)
    monkeypatch.setattr(AttentionBackendEnum.CUSTOM, "get_path", lambda: theirs, raising=False)
    compat.register_custom_attention_backend("ours.Backend")
    assert gpu_backend() is None
