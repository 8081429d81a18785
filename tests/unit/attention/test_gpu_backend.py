"""The GPU backend: vLLM's cache layout and metadata reach the kernel as the definition has them.

Without a GPU the kernel runs in Triton's interpreter; what vLLM calls around it is real.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import vllm_dllm.attention.flash_attention
import vllm_dllm.attention.gpu
from attention_kernels.api import FP8
from attention_kernels.batch import Batch
from attention_kernels.testing import PagedBatch, Request, allowed
from tests.triton_version import interpreted_without_gpu
from tests.unit.attention.metadata import common_metadata
from tests.unit.step import worker
from vllm_dllm import plugin
from vllm_dllm.attention import WindowRules, gpu_backend, use_window_rules
from vllm_dllm.attention.choice import Choice
from vllm_dllm.attention.flash_attention import FlashAttention
from vllm_dllm.attention.gpu import GpuCanvasBackend
from vllm_dllm.attention.warm_up import compile_attention

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


def metadata(batch: PagedBatch, by_blocks: bool = False):
    builder = GpuCanvasBackend.get_builder_cls()(None, [], None, torch.device("cpu"))
    rules = WindowRules(batch.symmetric, batch.spans, by_blocks)
    return builder.build(0, common_metadata(batch), window_rules=rules)


def engine_layout(batch: PagedBatch) -> torch.Tensor:
    """[num_blocks, Hkv, block_size, 2 * D], keys beside values, as vLLM allocates it."""
    return torch.cat((batch.key_cache, batch.value_cache), dim=-1).transpose(1, 2).contiguous()


def attend(
    batch: PagedBatch,
    kv_cache: torch.Tensor,
    cache_dtype: str = "auto",
    of_step: Any = None,
    window: int | None = WINDOW,
) -> torch.Tensor:
    impl = GpuCanvasBackend.get_impl_cls()(HQ, D, 0.3, HKV, None, window, cache_dtype)
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


WITH_IMAGES = [*REQUESTS, Request(40, 7, causal=True, images=((7, 12), (15, 40)))]


@pytest.mark.parametrize("requests", [REQUESTS, WITH_IMAGES], ids=["text", "images"])
def test_engine_layout(requests: list[Request]) -> None:
    batch = random_batch(torch.float32, requests)
    output = attend(batch, engine_layout(batch))
    allowed(batch, scale=0.3, window_left=WINDOW - 1).check(output)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_verified_blocks(monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
    """On a server whose canvases have room for a second copy of a block. Others refuse requests
    for them, and run a kernel that does not know them."""
    batch = random_batch(torch.float32, [*REQUESTS, Request(16, 24, causal=-8)])
    server = worker.config(architecture="SDARForCausalLM", settings={"blocks_in_flight": in_flight})
    monkeypatch.setattr(vllm_dllm.attention.gpu, "get_current_vllm_config_or_none", lambda: server)
    output = attend(batch, engine_layout(batch), window=None)
    with nullcontext() if in_flight == 2 else pytest.raises(AssertionError):
        allowed(batch, scale=0.3).check(output)


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
def gpu(
    monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]
) -> Callable[[int, int], list[str]]:
    """Pretends that there is a GPU of this capability; collects the warnings of our attention."""
    plugin.register()
    warnings = logged(vllm_dllm.attention, "warning_once")

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


class StandIn:
    """Computes what FlashAttention-4 does of the arguments that it is given, and notes them."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> None:
        self.calls.append(arguments)
        self.attend(**arguments)

    def attend(
        self,
        q: torch.Tensor,  # [T, Hq, D]
        k: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        aux_tensors: list[torch.Tensor] | None = None,
        dynamic_causal: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        for r, num_keys in enumerate(seqused_k.tolist()):
            first, end = cu_seqlens_q[r : r + 2].tolist()
            if first == end:
                continue
            row, key = torch.arange(end - first)[:, None], torch.arange(num_keys)
            if aux_tensors is None:
                assert dynamic_causal is not None
                seen = (key - row <= num_keys - (end - first)) | (dynamic_causal[r] == 0)
            else:
                slope, low, high = aux_tensors[0][r].tolist()
                seen = (key - slope * row >= low) & (key - slope * row <= high)
                for images in aux_tensors[1:]:
                    start, stop = images[r, : end - first, None].unbind(-1)
                    seen |= (key >= start) & (key < stop)
            pages = block_table[r, key // PAGE].long()
            keys, values = (cache[pages, key % PAGE].double() for cache in (k, v))
            group = q.shape[1] // k.shape[2]
            for head in range(q.shape[1]):
                scores = q[first:end, head].double() @ keys[:, head // group].T * softmax_scale
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                out[first:end, head] = (weights @ values[:, head // group]).to(out.dtype)


ALL_FA4 = Choice(((0, "fa4"),))


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    """Layers run FlashAttention-4, for which something stands in, wherever the choice says so."""

    def install(choice: Choice = ALL_FA4, has_flags: bool = False, **kinds: bool) -> StandIn:
        stand_in = StandIn()
        attention = FlashAttention(stand_in, has_flags, **{"has_masks": True, **kinds})
        monkeypatch.setattr(
            vllm_dllm.attention.gpu, "choose_versions", lambda *_: (choice, attention)
        )
        return stand_in

    return install


@pytest.mark.fa4
@pytest.mark.parametrize("requests", [REQUESTS, WITH_IMAGES], ids=["text", "images"])
def test_flash_attention_4_in_chunks(fa4: Callable[..., StandIn], requests: list[Request]) -> None:
    """A batch is cut up once: the next layer takes the same chunks."""
    stand_in, batch = fa4(), random_batch(torch.float32, requests)
    of_step = metadata(batch)
    right = allowed(batch, scale=0.3, window_left=WINDOW - 1)
    for _ in range(2):
        right.check(attend(batch, engine_layout(batch), of_step=of_step))
    one, two = stand_in.calls
    assert one["aux_tensors"][0] is two["aux_tensors"][0] and one["num_splits"] == 1
    assert one["mask_mod"].__name__ == ("band_mask" if batch.spans is None else "image_mask")


def test_flash_attention_4_by_flags(fa4: Callable[..., StandIn]) -> None:
    stand_in, batch = fa4(has_flags=True, has_masks=False), random_batch(torch.float32)
    output = attend(batch, engine_layout(batch), window=None)
    allowed(batch, scale=0.3, window_left=-1).check(output)
    (call,) = stand_in.calls
    assert call["causal"] is True and call["dynamic_causal"] is batch.causal
    assert call["max_seqlen_q"] == 256, "fewer are another compile key"
    assert "mask_mod" not in call


BLOCKS = [Request(12, 36, causal=4), Request(9, 17, causal=4)]
LEFT_TO_TRITON = {  # requests, whether they are causal by blocks, rows from which on FA4 runs
    "images, by flags": (WITH_IMAGES, False, 0),
    "blocks": (BLOCKS, True, 0),
    "a small step": (REQUESTS, False, 31),
}


@pytest.mark.parametrize("case", LEFT_TO_TRITON)
def test_what_flash_attention_4_cannot_do_or_does_slowly_runs_triton(
    fa4: Callable[..., StandIn], case: str
) -> None:
    requests, by_blocks, rows = LEFT_TO_TRITON[case]
    stand_in = fa4(Choice(((0, "triton"), (rows, "fa4"))), has_flags=True, has_masks=by_blocks)
    batch = random_batch(torch.float32, requests)
    of_step = metadata(batch, by_blocks)
    output = attend(batch, engine_layout(batch), of_step=of_step, window=None)
    allowed(batch, scale=0.3, window_left=-1).check(output)
    assert stand_in.calls == []


@pytest.mark.fa4
def test_all_that_runs_is_compiled_before_requests_come(
    fa4: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-4 with few rows and with many, Triton with every number of shares of the keys;
    once for each kind of layer."""
    stand_in = fa4(Choice(((0, "triton"), (1024, "fa4"))))
    of_triton: list[tuple[int, bool]] = []

    def attend(batch: Batch, **_: Any) -> None:
        of_triton.append((len(batch.query), batch.spans is not None))

    monkeypatch.setattr(vllm_dllm.attention.gpu.triton_fwd, "attention", attend)
    attention = GpuCanvasBackend.get_impl_cls()
    layers = [
        SimpleNamespace(
            impl=attention(HQ, D, 0.3, HKV, None, window, "auto"),
            kv_cache=torch.zeros(3, HKV, PAGE, 2 * D),
        )
        for window in (WINDOW, WINDOW, None)
    ]
    stand_in.attend = lambda **_: None  # type: ignore[method-assign]
    for has_images in (False, True):
        stand_in.calls.clear()
        of_triton.clear()
        compile_attention(
            [*layers, SimpleNamespace()], torch.float32, 2300, longest=5000, has_images=has_images
        )
        masks = range(1, 2 + has_images)
        calls = [(len(call["q"]), len(call["aux_tensors"])) for call in stand_in.calls]
        assert sorted(calls) == sorted(2 * [(n, each) for n in (1024, 2048) for each in masks])
        rows = [*(1 << i for i in range(10)), 1023]
        spans = [False, True][: 1 + has_images]
        assert sorted(of_triton) == sorted(2 * [(n, each) for n in rows for each in spans])
