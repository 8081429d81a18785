"""The drafter's context, stored in one go, is what vLLM stores in many steps."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from checkpoints.recipes.drafter.tiny import make_tiny_drafter, make_tiny_target
from tests import tolerances
from tests.engines import one_rank
from vllm_dllm.drafters.model import FusedContextModel

pytestmark = pytest.mark.numerics

NUM_BLOCKS, BLOCK_SIZE = 6, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedContextModel]:
    path = tmp_path_factory.mktemp("drafter")
    target = make_tiny_target(path / "target")
    drafter = make_tiny_drafter(path / "drafter", target)
    config = EngineArgs(
        str(target),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": 7,
        },
    ).create_engine_config()
    with one_rank(path), set_current_vllm_config(config):
        model = FusedContextModel(vllm_config=config, start_layer_id=4, prefix="model")
        model.load_weights(load_file(drafter / "model.safetensors").items())
        yield model


@pytest.fixture
def caches(model: FusedContextModel, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """FlashAttention's layout, which CPUs do not have: [blocks, heads, tokens, key and value]."""

    def write(
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        kept = slots >= 0
        rows = cache.transpose(1, 2)
        both = torch.cat((key, value), dim=-1)[kept]
        rows[slots[kept] // BLOCK_SIZE, slots[kept] % BLOCK_SIZE] = both

    made = []
    for layer in (layer.self_attn.attn for layer in model.layers):
        shape = (NUM_BLOCKS, layer.num_kv_heads, BLOCK_SIZE, 2 * layer.head_size)
        layer.kv_cache = torch.full(shape, torch.nan)
        monkeypatch.setattr(layer.impl, "do_kv_cache_update", write)
        made.append(layer.kv_cache)
    return made


@pytest.mark.parametrize("groups", [1, 2], ids=["one-group", "two-groups"])
def test_same_cache_as_vllms(
    model: FusedContextModel,
    caches: list[torch.Tensor],
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(9, 64, generator=generator)
    positions = torch.arange(3, 12)
    mapping = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[: 9 * groups]
    slots = list(mapping.view(groups, 9).clone())
    slots[0][4] = -1
    each = [slots[0], slots[groups - 1]]
    # Not the fused path; what is left is vLLM's but for a norm that its CPU kernel gets wrong.
    with monkeypatch.context() as patch:
        patch.setattr(model, "store_context_kv", lambda *_: False)
        model.precompute_and_store_context_kv(states, positions, list(each))
    expected = [cache.clone() for cache in caches]
    for cache in caches:
        cache.fill_(torch.nan)
    model.precompute_and_store_context_kv(states, positions, list(each))
    assert model._addresses
    for layer, cache in enumerate(caches):
        torch.testing.assert_close(
            cache, expected[layer], equal_nan=True, **tolerances.context_kv(width=64, size=4.0)
        )
        assert cache.isnan().any() and not cache.isnan().all()


def test_caches_made_anew_are_found(model: FusedContextModel, caches: list[torch.Tensor]) -> None:
    """On CUDA, vLLM captures graphs with throw-away caches before it makes the real ones."""
    states, positions, slots = torch.randn(2, 64), torch.arange(2), torch.tensor([1, 6])
    model.precompute_and_store_context_kv(states, positions, slots)
    thrown_away = [weakref.ref(cache.untyped_storage()) for cache in caches]
    expected = [cache.clone() for cache in caches]
    for layer, cache in zip(model.layers, expected, strict=True):
        layer.self_attn.attn.kv_cache = torch.full_like(cache, torch.nan)
    caches.clear()
    gc.collect()
    assert [storage() for storage in thrown_away] == [None, None]
    model.precompute_and_store_context_kv(states, positions, slots)
    for layer, cache in zip(model.layers, expected, strict=True):
        torch.testing.assert_close(
            layer.self_attn.attn.kv_cache, cache, equal_nan=True, rtol=0, atol=0
        )


def test_other_layouts_are_left_to_vllm(
    model: FusedContextModel, caches: list[torch.Tensor]
) -> None:
    states, positions, slots = torch.randn(2, 64), torch.arange(2), torch.arange(2)
    for layer in model.layers:
        layer.self_attn.attn.kv_cache = torch.zeros(2, NUM_BLOCKS, 2, BLOCK_SIZE, 32)
    written = []
    for layer in model.layers:
        layer.self_attn.attn.impl.do_kv_cache_update = lambda *a: written.append(a)
    model.precompute_and_store_context_kv(states, positions, slots)
    assert len(written) == len(model.layers)


def test_each_layers_keys_get_their_own_norm(model: FusedContextModel) -> None:
    """vLLM's CPU kernel takes the first layer's weight for all."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(len(model.layers), 5, 2, 32, generator=generator)
    normed = model._normalize_context_k(keys)
    for layer, out, into in zip(model.layers, normed, keys, strict=True):
        weight = layer.self_attn.k_norm.weight
        expected = torch.nn.functional.rms_norm(into, (32,), weight, model._rms_norm_eps)
        torch.testing.assert_close(out, expected, **tolerances.within(tolerances.norm(32)))
