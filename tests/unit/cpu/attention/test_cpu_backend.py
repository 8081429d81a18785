"""The CPU backend as a whole, vLLM's kernel and our canvas path in one batch: who sees whom,
exactly; numbers, against float64."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

from attention_kernels.testing import PagedBatch, Request, allowed
from tests.unit.attention.metadata import common_metadata
from tests.unit.attention_kernels.batches import VERIFIED
from tests.unit.attention_kernels.test_triton import MIXES as TRITON_MIXES
from tests.unit.attention_kernels.test_triton import WINDOWS, seen_by_definition
from vllm_dllm.attention import WindowRules
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.cpu.attention import canvases
from vllm_dllm.cpu.attention.backend import CpuCanvasBackend

pytestmark = pytest.mark.numerics

current_platform.import_kernels()

HQ, HKV, D = 4, 2, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIXES = {
    "causal": TRITON_MIXES["causal"],
    "canvases": [Request(8, 33), Request(8, 2), Request(1, 150), Request(3, 0)],
    "equal canvases": [Request(8, 120), Request(8, 120)],  # which end with their pages
    "mixed": [
        Request(8, 37),
        Request(8, 137, symmetric=True),
        Request(8, 37, causal=True),
        Request(21, 5, symmetric=True),
        Request(21, 130),
        Request(1, 0, causal=True),
    ],
    "images": [*TRITON_MIXES["images"], Request(0, 12)],
}
# Some requests of a batch, not at all of one length.
BY_BLOCKS = {"blocks": [*TRITON_MIXES["blocks"], Request(0, 12)], "verified": VERIFIED}
# Every mix with every window, every page size with both. Masked models have no window.
VISIBILITY = [
    pytest.param(mix, window_left, page, id=f"{mix}-window{window_left}-page{page}")
    for (m, mix), (w, window_left) in product(enumerate(MIXES), enumerate(WINDOWS))
    for page in [(32, 64, 128)[(m + w) % 3]]
] + [pytest.param(mix, -1, 32, id=mix) for mix in BY_BLOCKS]
Attend = Callable[..., torch.Tensor]


@pytest.fixture(params=["vec"])  # as without AMX
def isa(request: pytest.FixtureRequest) -> str:
    """What vLLM's choice of kernels is made to be."""
    return request.param


@pytest.fixture
def attend(isa: str, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Output [T, Hq, D] of a layer that has the backend to itself."""

    def run(
        batch: PagedBatch, window_left: int, scale: float = 0.3, softcap: float | None = None
    ) -> torch.Tensor:
        dtype, block_size = batch.query.dtype, batch.key_cache.shape[1]
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=dtype, architecture="none"),
            parallel_config=None,
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
        window = window_left + 1 if window_left >= 0 else None
        impl = CpuCanvasBackend.get_impl_cls()(HQ, D, scale, HKV, None, window, "auto", softcap)
        layer: Any = SimpleNamespace(impl=impl, _k_scale_float=1.0, _v_scale_float=1.0)
        monkeypatch.setattr(
            cpu_attn, "get_layers_from_vllm_config", lambda *_: {"the layer": layer}
        )
        monkeypatch.setattr(cpu_attn, "get_num_attention_heads_from_layers", lambda *_: HQ)
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: isa)
        spec = SimpleNamespace(num_kv_heads=HKV, head_size=D, block_size=block_size)
        builder = CpuCanvasBackend.get_builder_cls()(
            spec, ["the layer"], config, torch.device("cpu")
        )
        metadata = builder.build(
            0, common_metadata(batch), window_rules=WindowRules(batch.symmetric, batch.spans)
        )
        output = torch.full_like(batch.query, torch.nan)
        kv_cache = engine_layout(batch)
        return impl.forward(layer, batch.query, None, None, kv_cache, metadata, output)

    return run


def engine_layout(batch: PagedBatch) -> torch.Tensor:
    """[num_blocks, Hkv, block_size, 2 * D]: of a block and head the keys, transposed, then the
    values. vLLM zeroes new blocks; pages nobody owns hold NaN."""
    keys = batch.key_cache.permute(0, 2, 3, 1).flatten(2)
    values = batch.value_cache.permute(0, 2, 1, 3).flatten(2)
    num_blocks, block_size = batch.key_cache.shape[:2]
    cache = torch.stack((keys, values), dim=2).nan_to_num(0.0)
    is_owned = torch.isin(torch.arange(num_blocks), batch.block_table)
    cache[~is_owned] = torch.nan
    return cache.view(num_blocks, HKV, block_size, 2 * D)


def random_batch(mix: str, block_size: int, dtype: torch.dtype) -> PagedBatch:
    return PagedBatch.random(
        (MIXES | BY_BLOCKS)[mix],
        num_heads=HQ,
        num_kv_heads=HKV,
        head_size=D,
        block_size=block_size,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mix", "window_left", "block_size"), VISIBILITY)
def test_visibility(
    attend: Attend, mix: str, window_left: int, block_size: int, dtype: str
) -> None:
    batch = random_batch(mix, block_size, DTYPES[dtype])
    for first_key in range(0, int(batch.seq_lens.max()), D):
        output = attend(batch.probe(first_key), window_left, scale=1.0)
        expected = seen_by_definition(batch, window_left, first_key)
        assert torch.equal(output > 0, expected[:, None].expand_as(output))


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["no cap", "cap"])
@pytest.mark.parametrize("window_left", [-1, 0, 11, 200])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers(
    attend: Attend, dtype: str, mix: str, window_left: int, softcap: float | None
) -> None:
    batch = random_batch(mix, 32, DTYPES[dtype])
    output = attend(batch, window_left, softcap=softcap)
    right = allowed(
        batch,
        scale=0.3,
        window_left=window_left,
        softcap=softcap or 0.0,
        # vLLM's kernels cut fp32 off to bf16 on processors without instructions that round it.
        cuts_off=not torch.cpu._is_avx512_bf16_supported(),
    )
    right.check(output)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_verified_blocks(attend: Attend, dtype: str) -> None:
    test_numbers(attend, dtype, "verified", -1, None)


@pytest.mark.parametrize("isa", ["amx"], indirect=True)
@pytest.mark.parametrize("window_left", [0, 11])
def test_a_processor_with_amx_serves_bf16(attend: Attend, window_left: int) -> None:
    """vLLM's kernels for it lay the cache out in another way than canvases read it."""
    test_numbers(attend, "bf16", "mixed", window_left, None)


@pytest.mark.parametrize("isa", ["amx"], indirect=True)
def test_it_also_serves_verified_blocks(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(verifies_copies=True)
    monkeypatch.setattr(MaskedConfig, "if_masked", lambda config: said)
    test_numbers(attend, "bf16", "verified", -1, None)


def test_layout_check_accepts_this_machine_and_refuses_other_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    canvases.check_cache_layout("vec", torch.float32, 32)
    monkeypatch.setattr(canvases, "write_cpu_kv_cache", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match="which the 'other' kernels do not have"):
        canvases.check_cache_layout("other", torch.float32, 32)
