"""What vLLM has since 0.33, and 0.32 lacks: stand-ins for it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_dllm.compat import gpu, version
from vllm_dllm.compat.dflash import FiniteStatesSpeculator
from vllm_dllm.drafters import model
from vllm_dllm.drafters.dflash import WidthDFlashSpeculator


@pytest.mark.parametrize(
    "renames",
    [
        {"orig_to_new_substr": {"midlayer": "layers.0"}},
        {"orig_to_new_regex": {re.compile("midlayer"): "layers.0"}},
    ],
    ids=["0.32", "0.33"],
)
def test_weights_are_counted_by_the_names_that_vllm_gives_them(
    monkeypatch: pytest.MonkeyPatch, renames: dict[str, Any]
) -> None:
    mappers: list[WeightsMapper] = []

    monkeypatch.setattr(model, "load_checked", lambda *loaded: mappers.append(loaded[3]))
    drafter = model.CompleteDrafter.__new__(model.CompleteDrafter)
    torch.nn.Module.__init__(drafter)
    drafter.model = torch.nn.Module()
    drafter.model.hf_to_vllm_mapper = WeightsMapper(**renames)
    drafter.load_weights(())
    assert mappers[0].map_name("midlayer.mlp") == "model.layers.0.mlp"


@dataclass
class Batch:
    """Three requests with a token each, as vLLM describes a step."""

    req_ids: Any = ("a", "b", "c")
    num_reqs: int = 3
    num_tokens: int = 3
    idx_mapping: Any = None
    idx_mapping_np: Any = None
    num_scheduled_tokens: Any = None
    query_start_loc: Any = None
    positions: Any = None
    seq_lens_cpu_upper_bound: Any = None


@pytest.mark.parametrize("is_newer", [False, True], ids=["0.32", "0.33"])
def test_a_draft_for_some_requests(monkeypatch: pytest.MonkeyPatch, is_newer: bool) -> None:
    """Watermarks follow the requests, and cache blocks that a window has passed stay away."""
    numbers = torch.arange(3)
    batch = Batch(
        idx_mapping=numbers,
        idx_mapping_np=numbers.numpy(),
        query_start_loc=torch.arange(4),
        positions=numbers,
        seq_lens_cpu_upper_bound=numbers,
    )
    state = SimpleNamespace(contexts=numbers[:, None] + 7, enabled=torch.tensor([1, 0, 1]) == 1)
    speculator = object.__new__(WidthDFlashSpeculator)
    speculator.device = torch.device("cpu")
    speculator.draft_watermarker = SimpleNamespace(state=state)
    gathered: list[dict[str, Any]] = []
    speculator.block_tables = SimpleNamespace(
        gather_block_tables=lambda *_, **options: gathered.append(options)
    )
    computed = torch.tensor([5, 6, 7], dtype=torch.int32)
    speculator.req_states = SimpleNamespace(num_computed_tokens=SimpleNamespace(gpu=computed))
    monkeypatch.setattr(version, "is_at_least", lambda _: is_newer)
    monkeypatch.setattr(FiniteStatesSpeculator, "propose", lambda self, *_: "drafts")
    rows, rejected = np.array([0, 2]), torch.zeros(3, dtype=torch.int32)
    states = torch.zeros(3, 4)
    found = speculator.propose_for_requests(rows, batch, {}, {}, states, None, rejected, rejected)
    assert found == "drafts"
    newer = {"num_computed_tokens": computed} if is_newer else {}
    assert gathered == [{"num_reqs_padded": 2, **newer}]
    assert state.contexts[:2, 0].tolist() == [7, 9] and state.enabled[:2].tolist() == [True, True]


def test_joined_weights_of_a_server_that_sleeps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM restores parameters and buffers, and these are neither."""
    tags, joined = ["weights"], []

    @contextmanager
    def use_memory_pool(tag: str) -> Iterator[None]:
        tags.append(tag)
        yield
        tags.pop()

    allocator = SimpleNamespace(use_memory_pool=use_memory_pool)
    monkeypatch.setattr(gpu, "get_mem_allocator_instance", lambda: allocator)
    drafter = SimpleNamespace(
        model=SimpleNamespace(_build_fused_kv_buffers=lambda: joined.append(tags[-1]))
    )
    monkeypatch.setattr(DFlashSpeculator, "load_draft_model", lambda *_: drafter)
    speculator: Any = object.__new__(FiniteStatesSpeculator)
    for can_sleep in (False, True):
        model_config = SimpleNamespace(enable_cumem_allocator=can_sleep)
        speculator.vllm_config = SimpleNamespace(model_config=model_config)
        assert speculator.load_draft_model(torch.nn.Module(), set()) is drafter
    assert joined == ["runtime"]
