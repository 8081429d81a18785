"""Drafting on a GPU: nobody waits, whichever requests are drafted for; a predictor's widths are
waited for by who reads them."""

from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from tests.gpu_dry_run.fake_cuda import CUDA, FakeCuda
from vllm_dllm.drafters.context import PendingContext
from vllm_dllm.drafters.dflash import PENDING_TOKENS, WidthDFlashSpeculator
from vllm_dllm.drafters.passes import reveal_counts

WIDEST, REQUESTS, TOKENS, H, V = 7, ("a", "b", "c"), 8, 64, 500
LAYERS = 2


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=CUDA)


class Model:
    """A drafter, as far as its context goes."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(layers=[None] * LAYERS)
        self.num_stored = 0  # tokens

    def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def precompute_and_store_context_kv(
        self, states: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]
    ) -> None:
        self.num_stored += len(positions)


def make_batch(is_prefill: bool) -> Any:
    """What is read of vLLM's InputBatch: each request has computed `TOKENS` tokens."""
    n = len(REQUESTS)
    columns = dict(
        req_ids=list(REQUESTS),
        num_reqs=n,
        num_tokens=n * TOKENS,
        num_scheduled_tokens=np.full(n, TOKENS, dtype=np.int32),
        num_computed_tokens_np=np.zeros(n, dtype=np.int32),
        num_draft_tokens=0 if is_prefill else n * WIDEST,
        is_prefilling_np=np.full(n, is_prefill),
        prefill_len_np=np.full(n, TOKENS, dtype=np.int32),
        query_start_loc_np=np.arange(n + 1, dtype=np.int32) * TOKENS,
        query_start_loc=zeros(n + 1, dtype=torch.int32),
        idx_mapping_np=np.arange(n, dtype=np.int32),
        idx_mapping=zeros(n, dtype=torch.int32),
        positions=zeros(n * TOKENS, dtype=torch.int64),
        seq_lens_cpu_upper_bound=torch.full((n,), TOKENS, dtype=torch.int32),
    )
    return make_dataclass("InputBatch", columns)(**columns)


@pytest.fixture
def speculator(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> WidthDFlashSpeculator:
    made = WidthDFlashSpeculator.__new__(WidthDFlashSpeculator)
    monkeypatch.setattr(
        DFlashSpeculator,
        "propose",
        lambda self, batch, *_, **__: self.draft_tokens[: batch.num_reqs],
    )
    made.device, made.dp_size, made.num_speculative_steps = CUDA, 1, WIDEST
    made.max_num_reqs, made.num_query_per_req = len(REQUESTS), WIDEST + 1
    made.model, made._layer_group_idx = Model(), None
    made.draft_kv_cache_group_ids = [0]
    mappings = zeros(1, 4096, dtype=torch.int64)
    made.block_tables = SimpleNamespace(
        slot_mappings=mappings, gather_block_tables=lambda *_, **__: None
    )
    counts = SimpleNamespace(gpu=zeros(len(REQUESTS), dtype=torch.int32))
    made.req_states = SimpleNamespace(num_computed_tokens=counts)
    made.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    made.draft_tokens = zeros(len(REQUESTS), WIDEST, dtype=torch.int64)
    rows = len(REQUESTS) * (WIDEST + 1)
    made.input_buffers = SimpleNamespace(
        input_ids=zeros(rows, dtype=torch.int32), seq_lens=zeros(len(REQUESTS), dtype=torch.int32)
    )
    made.sample_indices = zeros(len(REQUESTS) * WIDEST, dtype=torch.int64)
    made.compute_draft_logits = lambda hidden, _: zeros(len(hidden), V)
    made._predictor, made._predicted, made._narrows = None, {}, True
    made._target = SimpleNamespace(compute_logits=lambda hidden: zeros(len(hidden), V))
    made._reveal_counts = reveal_counts(WIDEST, 3)
    made._pending, made._num_context = PendingContext(PENDING_TOKENS), 512
    made._block_widths = zeros(len(REQUESTS), dtype=torch.int32)
    made._widths, made._stop_tokens = {}, {}
    return made


def propose(speculator: WidthDFlashSpeculator, is_prefill: bool = False) -> None:
    batch = make_batch(is_prefill)
    states = [zeros(batch.num_tokens, H)]
    counts = (zeros(batch.num_reqs, dtype=torch.int32) for _ in range(2))
    drafts = speculator.propose(batch, {}, {}, states[0], states, *counts)
    assert drafts.shape == (len(REQUESTS), WIDEST)
    speculator.blocks_prepared()


@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "verification"])
@pytest.mark.parametrize(
    "widths",
    [(7, 7, 7), (2, 5, 7), (0, 3, 0), (0, 0, 0)],
    ids=["fixed", "of its own each", "some", "none"],
)
def test_drafting_waits_for_nothing(
    speculator: WidthDFlashSpeculator, cuda: FakeCuda, widths: tuple[int, ...], is_prefill: bool
) -> None:
    speculator._widths = dict(zip(REQUESTS, widths, strict=True))
    for _ in range(3):
        propose(speculator, is_prefill)
    assert cuda.waits == []


def test_context_beyond_the_limit_is_chosen_without_waiting(
    speculator: WidthDFlashSpeculator, cuda: FakeCuda
) -> None:
    speculator._widths, speculator._num_context = dict.fromkeys(REQUESTS, 0), TOKENS // 2
    propose(speculator)
    assert cuda.waits == []
    assert speculator.model.num_stored == len(REQUESTS) * TOKENS // 2


def test_unmasking_in_several_steps_waits_for_nothing(
    speculator: WidthDFlashSpeculator, cuda: FakeCuda
) -> None:
    rows = len(REQUESTS) * (WIDEST + 1)
    drafts = speculator.generate_draft(len(REQUESTS), lambda: zeros(rows, H))
    assert drafts is not None and drafts.shape == (len(REQUESTS), WIDEST)
    assert cuda.waits == []


def test_predicted_widths_are_waited_for_when_they_are_read(
    speculator: WidthDFlashSpeculator, cuda: FakeCuda
) -> None:
    speculator._predictor = SimpleNamespace(
        predict_widths=lambda logits: zeros(len(logits), dtype=torch.int64)
    )
    propose(speculator, is_prefill=True)
    widths = speculator.take_predicted_widths()
    assert cuda.waits == []
    assert len(widths) == len(REQUESTS)
    assert list(widths) == list(REQUESTS)
    (wait,) = cuda.waits
    assert wait.startswith("an event at vllm_dllm/drafters/blockpilot.py")
