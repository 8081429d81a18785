"""The keys of a drafter's context on CPUs."""

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from checkpoints.recipes.drafter.tiny import make_tiny_drafter, make_tiny_target
from tests import tolerances
from tests.engines import one_rank
from vllm_dllm.compat.dflash import MendedDFlashModel

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MendedDFlashModel]:
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
        model = MendedDFlashModel(vllm_config=config, start_layer_id=4, prefix="model")
        model.load_weights(load_file(drafter / "model.safetensors").items())
        model._build_fused_kv_buffers()  # as vLLM does when a whole drafter is loaded
        yield model


def test_each_layers_keys_get_their_own_norm(model: MendedDFlashModel) -> None:
    """vLLM's CPU kernel takes the first layer's weight for all."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(len(model.layers), 5, 2, 32, generator=generator)
    normed = model._normalize_context_k(keys)
    for layer, out, into in zip(model.layers, normed, keys, strict=True):
        weight = layer.self_attn.k_norm.weight
        expected = torch.nn.functional.rms_norm(into, (32,), weight, model._rms_norm_eps)
        torch.testing.assert_close(out, expected, **tolerances.within(tolerances.norm(32)))
