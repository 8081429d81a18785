"""What drafters do on ranks of pipeline and data parallelism, with a trainer's weights on GPUs, and
with the keys of their context on CPUs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu_worker import Worker

from checkpoints.recipes.drafter.tiny import make_tiny_drafter, make_tiny_target
from tests import tolerances
from tests.engines import one_rank
from vllm_dllm.compat.dflash import DFlashHooks, MendedDFlashModel
from vllm_dllm.compat.drafting import send_widths_to_speculator
from vllm_dllm.drafters.dflash import WidthDFlashSpeculator
from vllm_dllm.drafters.worker import DraftWorker
from vllm_dllm.quantization import checked_weights
from vllm_dllm.step.runner.worker import CanvasWorker


def test_only_the_last_stage_has_a_speculator() -> None:
    begun: list[Any] = []
    step = SimpleNamespace(draft_widths={"a": 3})
    for speculator in (None, SimpleNamespace(step_begins=lambda *of_step: begun.append(of_step))):
        send_widths_to_speculator(SimpleNamespace(speculator=speculator), step)
    assert begun == [(step, {"a": 3})]


def test_widths_are_predicted_under_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the steps without requests, with which a rank waits for the others."""
    asked: list[Any] = []
    monkeypatch.setattr(DFlashHooks, "propose", lambda *_, dummy_run, **__: "drafts")
    monkeypatch.setattr(
        WidthDFlashSpeculator, "_predict_widths", lambda self, *of_step: asked.append(of_step)
    )
    speculator = object.__new__(WidthDFlashSpeculator)
    speculator.dp_size, speculator._predictor = 2, object()
    for dummy_run in (True, False):
        found = speculator.propose("batch", {}, {}, "states", None, None, dummy_run=dummy_run)
        assert found == "drafts"
    assert asked == [("batch", "states")]


@pytest.mark.parametrize("worker", [CanvasWorker, DraftWorker])
def test_a_trainers_weights_come_in_parts(
    monkeypatch: pytest.MonkeyPatch, worker: type[Worker]
) -> None:
    in_parts = checked_weights._come_in_parts
    found = []
    monkeypatch.setattr(Worker, "update_weights", lambda *_: found.append(in_parts.get()))
    worker.update_weights(object.__new__(worker), {"names": []})
    assert found == [True] and not in_parts.get()


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


@pytest.mark.numerics
def test_each_layers_keys_get_their_own_norm(model: MendedDFlashModel) -> None:
    """vLLM's CPU kernel takes the first layer's weight for all."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(len(model.layers), 5, 2, 32, generator=generator)
    normed = model._normalize_context_k(keys)
    for layer, out, into in zip(model.layers, normed, keys, strict=True):
        weight = layer.self_attn.k_norm.weight
        expected = torch.nn.functional.rms_norm(into, (32,), weight, model._rms_norm_eps)
        torch.testing.assert_close(out, expected, **tolerances.within(tolerances.norm(32)))
