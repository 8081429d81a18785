"""Context keys and values: the definition against loops in float64, Triton against the definition.

Without a GPU, Triton runs in its interpreter, in fp32 and fp16 (bf16 is multiplied wrongly there).
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.drafters import context_kv_triton
from vllm_dllm.drafters.context import FP8, ContextWeights, DrafterCaches
from vllm_dllm.drafters.context_kv import context_kv, store_context_kv_

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L, N, H = 2, 2, 48
NUM_BLOCKS, BLOCK_SIZE = 9, 16
FP32 = tolerances.context_kv(width=H, size=4.0)  # normed keys and values, most of them below 4
FUSED, UNFUSED = 21, 70  # tokens

HEADS = {  # head size, rotating, neox
    "neox": (32, 32, True),
    "interleaved": (32, 32, False),
    "neox, a part rotates": (32, 8, True),
    "interleaved, a part rotates": (32, 8, False),
    "head size 48": (48, 48, True),
}


def random_weights(
    head: str = "neox", dtype: torch.dtype = torch.float32, **options: object
) -> ContextWeights:
    head_size, rotating, is_neox = HEADS[head]
    angles = torch.arange(100)[:, None] * 0.3 ** torch.arange(rotating // 2)
    return ContextWeights(
        hidden_norm=1 + 0.3 * torch.randn(H).to(dtype),
        projection=torch.randn(L * 2 * N * head_size, H).to(dtype) / H**0.5,
        k_norm=1 + 0.3 * torch.randn(L, head_size).to(dtype),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
        is_neox=is_neox,
        eps=1e-5,
        **options,
    )


def empty_caches(
    head_size: int,
    dtype: torch.dtype,
    layout: str = "NHD",
    scales: Tensor | None = None,
    device: str = "cpu",
) -> DrafterCaches:
    """In the layouts of vLLM's GPU backends; not-a-number where nothing is written."""
    if layout == "NHD":  # a layer's keys and values side by side, block by block
        raw = torch.full((L, NUM_BLOCKS, 2, BLOCK_SIZE, N, head_size), float("nan"))
        raw = raw.to(dtype).to(device)
        keys, values = raw[:, :, 0], raw[:, :, 1]
    else:  # a head's tokens side by side
        raw = torch.full((L, 2, NUM_BLOCKS, N, BLOCK_SIZE, head_size), float("nan"))
        raw = raw.to(dtype).to(device)
        keys, values = raw.transpose(3, 4)[:, 0], raw.transpose(3, 4)[:, 1]
    return DrafterCaches.of(list(keys), list(values), None if scales is None else scales.to(device))


def random_slots(num_tokens: int, shape: tuple[int, ...] = ()) -> Tensor:
    """A slot of its own for each token but every fourth, which has none."""
    slots = torch.rand(*shape, NUM_BLOCKS * BLOCK_SIZE).argsort(-1)[..., :num_tokens]
    slots[..., 1::4] = -1
    return slots


def by_loops(states: Tensor, positions: Tensor, weights: ContextWeights) -> tuple[Tensor, Tensor]:
    """Keys and values [L, T, N, D] in float64, one head of one token at a time."""
    D, R = weights.head_size, weights.cos_sin.shape[1]
    keys, values = (torch.zeros(L, len(states), N, D, dtype=torch.float64) for _ in range(2))
    projection = weights.projection.double().view(L, 2, N, D, H)
    bias = torch.zeros(L, 2, N, D) if weights.bias is None else weights.bias.view(L, 2, N, D)
    for t, state in enumerate(states.double()):
        normed = state / (state.square().mean() + weights.eps).sqrt() * weights.hidden_norm
        cos, sin = weights.cos_sin[positions[t]].double().chunk(2)
        for layer in range(L):
            for head in range(N):
                key = projection[layer, 0, head] @ normed + bias[layer, 0, head]
                key = key / (key.square().mean() + weights.eps).sqrt() * weights.k_norm[layer]
                for i in range(R // 2):
                    a, b = (i, i + R // 2) if weights.is_neox else (2 * i, 2 * i + 1)
                    key[a], key[b] = (
                        key[a] * cos[i] - key[b] * sin[i],
                        key[b] * cos[i] + key[a] * sin[i],
                    )
                keys[layer, t, head] = key
                value = projection[layer, 1, head] @ normed + bias[layer, 1, head]
                values[layer, t, head] = value * weights.value_factor
    return keys, values


@pytest.mark.parametrize("head", HEADS)
def test_definition(head: str) -> None:
    bias = torch.randn(L * 2 * N * HEADS[head][0])
    weights = random_weights(head, bias=bias, value_factor=0.7)
    states, positions = 3 * torch.randn(9, H), torch.randint(100, (9,))
    for ours, expected in zip(
        context_kv(states, positions, weights), by_loops(states, positions, weights), strict=True
    ):
        torch.testing.assert_close(ours.double(), expected, **FP32)


def test_definition_agrees_with_the_model_drafters_are_published_for() -> None:
    """Qwen3's attention, on which DFlash drafters are built, at its own rotation."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3Attention,
        Qwen3RMSNorm,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = Qwen3Config(
        hidden_size=H, num_attention_heads=4, num_key_value_heads=N, head_dim=32, eps=1e-5
    )
    norm = Qwen3RMSNorm(H, 1e-6)
    layers = [Qwen3Attention(config, layer) for layer in range(L)]
    for parameter in (p for module in (norm, *layers) for p in module.parameters()):
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0)
    states, positions = torch.randn(7, H), torch.randint(100, (7,))
    cos, sin = Qwen3RotaryEmbedding(config)(states, torch.arange(100)[None])
    weights = ContextWeights(
        hidden_norm=norm.weight.detach(),
        projection=torch.cat(
            [w.detach() for a in layers for w in (a.k_proj.weight, a.v_proj.weight)]
        ),
        k_norm=torch.stack([a.k_norm.weight.detach() for a in layers]),
        cos_sin=torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1),
        is_neox=True,
        eps=1e-6,
    )
    keys, values = context_kv(states, positions, weights)
    with torch.no_grad():
        for layer, attention in enumerate(layers):
            key = attention.k_norm(attention.k_proj(norm(states)).view(1, 7, N, 32)).transpose(1, 2)
            key, _ = apply_rotary_pos_emb(key, key, cos[:, positions], sin[:, positions])
            torch.testing.assert_close(keys[layer], key[0].transpose(0, 1), **FP32)
            value = attention.v_proj(norm(states)).view(7, N, 32)
            torch.testing.assert_close(values[layer], value, **FP32)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("groups", [(), (L,)], ids=["one slot mapping", "a mapping a layer"])
def test_writes_slots_and_nothing_else(layout: str, groups: tuple[int, ...]) -> None:
    weights = random_weights()
    states, positions = torch.randn(FUSED, H), torch.randint(100, (FUSED,))
    slots = random_slots(FUSED, groups)
    caches = empty_caches(32, torch.float32, layout)
    expected = [torch.full((NUM_BLOCKS * BLOCK_SIZE, N, 32), float("nan")) for _ in range(2 * L)]
    new = context_kv(states, positions, weights)
    for layer, layer_slots in enumerate(slots.expand(L, -1)):
        for t, slot in enumerate(layer_slots.tolist()):
            if slot >= 0:
                expected[2 * layer][slot] = new[0][layer, t]
                expected[2 * layer + 1][slot] = new[1][layer, t]
    store_context_kv_(states, positions, slots, weights, caches)
    for layer in range(L):
        for of_layer, cache in ((0, caches.keys[layer]), (1, caches.values[layer])):
            written = cache.reshape(-1, N, 32)
            assert torch.equal(
                written.nan_to_num(99), expected[2 * layer + of_layer].nan_to_num(99)
            )


def test_fp8_is_scaled_and_saturates() -> None:
    weights = random_weights(value_factor=1000.0)
    states, positions = torch.randn(FUSED, H), torch.randint(100, (FUSED,))
    slots = torch.arange(FUSED)
    scales = torch.tensor([[0.01, 0.5], [0.5, 2.0]])
    caches = empty_caches(32, FP8, scales=scales)
    store_context_kv_(states, positions, slots, weights, caches)
    keys, values = context_kv(states, positions, weights)
    for layer, (k_scale, v_scale) in enumerate(scales.tolist()):
        for cache, new, scale in (
            (caches.keys[layer], keys[layer], k_scale),
            (caches.values[layer], values[layer], v_scale),
        ):
            stored = cache.reshape(-1, N, 32)[:FUSED].float()
            limit = (new / scale).clamp(-448, 448)
            torch.testing.assert_close(stored, limit, **tolerances.one_step(FP8))
    assert (caches.values[0].reshape(-1, N, 32)[:FUSED].float().abs() == 448).any()


@pytest.fixture(scope="module")
def fused() -> Iterator[ModuleType]:
    if torch.cuda.is_available():
        yield context_kv_triton
        return
    from triton.runtime import interpreter

    interpret_kernels(context_kv_triton)
    convert = interpreter._convert_float

    def convert_to_fp8(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        """Triton 3.9's interpreter loses the carry where rounding to fp8 reaches the next power
        of two."""
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(data, source, target, rounding)
        return torch.from_numpy(data.copy()).to(FP8).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_to_fp8)
        yield context_kv_triton


CASES = {
    "neox": dict(head="neox"),
    "interleaved": dict(head="interleaved"),
    "neox, a part rotates": dict(head="neox, a part rotates"),
    "interleaved, a part rotates": dict(head="interleaved, a part rotates"),
    "head size 48": dict(head="head size 48"),
    "fp8": dict(head="neox", cache=FP8),
    "HND": dict(head="neox", layout="HND"),
    "a mapping a layer": dict(head="neox", groups=(L,)),
    "bias and factor": dict(head="neox", bias=True),
    "none written": dict(head="neox", written=False),
}


@pytest.mark.parametrize("num_tokens", [FUSED, UNFUSED], ids=["fused", "after a GEMM"])
@pytest.mark.parametrize("case", CASES)
def test_triton(fused: ModuleType, case: str, num_tokens: int) -> None:
    compare_with_definition(fused, num_tokens=num_tokens, **CASES[case])


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_triton_of_hardly_any_token(fused: ModuleType, num_tokens: int) -> None:
    compare_with_definition(fused, num_tokens=num_tokens)


def test_triton_fp16(fused: ModuleType) -> None:
    """Not fused at any length: states times their norm's weights are beyond fp16."""
    compare_with_definition(fused, num_tokens=FUSED, dtype=torch.float16, magnitude=60_000.0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [FUSED, UNFUSED], ids=["fused", "after a GEMM"])
def test_triton_bf16(fused: ModuleType, num_tokens: int) -> None:
    compare_with_definition(fused, num_tokens=num_tokens, dtype=torch.bfloat16, bias=True)


def compare_with_definition(
    fused: ModuleType,
    num_tokens: int = FUSED,
    head: str = "neox",
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    layout: str = "NHD",
    groups: tuple[int, ...] = (),
    bias: bool = False,
    written: bool = True,
    magnitude: float = 3.0,
) -> None:
    head_size = HEADS[head][0]
    options: dict[str, object] = {}
    if bias:
        options = dict(bias=torch.randn(L * 2 * N * head_size).to(dtype), value_factor=0.7)
    weights = random_weights(head, dtype, **options)
    states = (magnitude * torch.rand(num_tokens, H) - magnitude / 2).to(dtype)
    positions = torch.randint(100, (num_tokens,))
    slots = random_slots(num_tokens, groups) if written else torch.full((num_tokens,), -1)
    scales = torch.tensor([[0.01, 0.05], [0.5, 2.0]]) if cache == FP8 else None
    expected = empty_caches(head_size, cache or dtype, layout, scales)
    store_context_kv_(states, positions, slots, weights, expected)
    ours = empty_caches(head_size, cache or dtype, layout, scales, DEVICE)
    positions[slots.expand(L, -1).amax(0) < 0] = 10**6  # nobody's position
    on_device = ContextWeights(
        **{
            name: value.to(DEVICE) if isinstance(value, Tensor) else value
            for name, value in vars(weights).items()
        }
    )
    fused.store_context_kv_(
        states.to(DEVICE),
        positions.to(DEVICE),
        slots.to(DEVICE).expand(L, -1),
        on_device,
        ours,
    )
    allowed = FP32
    if cache == FP8:
        allowed = tolerances.one_step(FP8)
    elif dtype != torch.float32:
        allowed = tolerances.context_kv(width=H, size=4.0, dtype=dtype)
    for layer in range(L):
        for mine, right in (
            (ours.keys[layer], expected.keys[layer]),
            (ours.values[layer], expected.values[layer]),
        ):
            mine, right = mine.float().cpu(), right.float().cpu()
            torch.testing.assert_close(mine, right, **allowed, equal_nan=True)
            if cache == FP8:
                assert (mine.nan_to_num() != right.nan_to_num()).float().mean() < 0.01


def test_caches_of_different_layouts_are_refused() -> None:
    keys = [torch.zeros(4, 16, N, 32), torch.zeros(4, N, 16, 32).transpose(1, 2)]
    with pytest.raises(ValueError, match=r"of all layers to be alike.*\(1024, 64, 32, 1\).*512"):
        DrafterCaches.of(keys, keys)


def test_weights_that_do_not_fit_are_refused() -> None:
    weights = vars(random_weights())
    with pytest.raises(ValueError, match="multiple of 128, got 255"):
        ContextWeights(**weights | {"projection": weights["projection"][:-1]})
    with pytest.raises(ValueError, match="got 32 and cos_sin with 34"):
        ContextWeights(**weights | {"cos_sin": torch.zeros(100, 34)})
