"""What the model state hands to attention, how long it is kept, which rows belong to which image,
and that a captured CUDA graph can go on reading it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.multimodal.inputs import PlaceholderRange

from vllm_dllm.attention import WindowRules, takes_window_rules
from vllm_dllm.step.masked.masked_state import (
    DraftingModelState,
    MaskedModelState,
    ShiftedModelState,
)
from vllm_dllm.step.runner import model_state
from vllm_dllm.step.runner.attn_requests import AttnRequests, ImageRows, LatestMetadata
from vllm_dllm.step.runner.model_state import DiffusionModelState
from vllm_dllm.step.slots import CanvasSlots, SlotNumbers

C, MAX_REQS = 4, 6


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> DiffusionModelState:
    """Without an engine; `prepare_attn` returns the arguments of vLLM's metadata builders."""

    def built(**kwargs: Any) -> dict[str, Any]:
        extras = kwargs["model_specific_attn_metadata"].get_extra_attn_kwargs(
            SimpleNamespace(takes_window_rules=True), kwargs["num_reqs"]
        )
        return kwargs | extras

    monkeypatch.setattr(model_state, "build_attn_metadata", built)
    state = DiffusionModelState.__new__(DiffusionModelState)
    state.device = torch.device("cpu")
    state.model_config = SimpleNamespace(max_model_len=100)
    state._latest_metadata = None
    state._causal = torch.zeros(2 * MAX_REQS, dtype=torch.int32)
    state._symmetric = torch.zeros(2 * MAX_REQS, dtype=torch.int32)
    canvas = torch.zeros(MAX_REQS, C, dtype=torch.int64)
    state.step = SimpleNamespace(slots=CanvasSlots(canvas, 8, torch.float32))
    return state


def prepare(state: DiffusionModelState, mode: CUDAGraphMode, **options: Any) -> dict[str, Any]:
    """A step of two canvases, in slots 3 and 1; a graph pads it to three requests."""
    query_start_loc = np.array([0, C, 2 * C, 2 * C], dtype=np.int32)
    batch = SimpleNamespace(
        num_reqs=2,
        num_reqs_after_padding=3,
        num_tokens=2 * C,
        num_tokens_after_padding=3 * C,
        num_draft_tokens_per_req=np.array([C, C], dtype=np.int32),
        num_scheduled_tokens=np.array([C, C], dtype=np.int32),
        is_prefilling_np=np.zeros(2, dtype=bool),
        has_prefill=False,
        max_query_len=C,
        query_start_loc_np=query_start_loc,
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.tensor([20, 30, 0], dtype=torch.int32),
        positions=torch.tensor([*range(16, 20), *range(26, 30), *[0] * C]),
        idx_mapping=torch.tensor([3, 1]),
        idx_mapping_np=np.array([3, 1], dtype=np.int32),
    )
    tables = (torch.zeros(3, 2, dtype=torch.int32),)
    mappings = torch.zeros(1, 3 * C, dtype=torch.int64)
    return state.prepare_attn(batch, mode, tables, mappings, [], None, **options)


def test_flags_of_the_batchs_slots(state: DiffusionModelState) -> None:
    numbers = state.step.slots.numbers
    numbers[3, SlotNumbers._fields.index("is_committing")] = 1
    numbers[1, SlotNumbers._fields.index("symmetric_window")] = 1
    metadata = prepare(state, CUDAGraphMode.NONE)
    assert metadata["causal"].tolist() == [1, 0]
    assert metadata["window_rules"].symmetric.tolist() == [0, 1]
    assert metadata["num_reqs"] == 2 and metadata["num_tokens"] == 2 * C


@pytest.mark.parametrize("for_capture", [True, False])
def test_a_full_graph_reads_buffers_that_stay(
    state: DiffusionModelState, for_capture: bool
) -> None:
    metadata = prepare(state, CUDAGraphMode.FULL, for_capture=for_capture)
    assert metadata["num_reqs"] == 3 and metadata["num_tokens"] == 3 * C
    assert metadata["causal"].data_ptr() == state._causal.data_ptr()
    assert metadata["window_rules"].symmetric.data_ptr() == state._symmetric.data_ptr()
    assert len(metadata["causal"]) == len(metadata["window_rules"].symmetric) == 3
    # vLLM builds metadata for a capture without what only our builders take.
    assert not metadata.get("for_cudagraph_capture")


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_images_go_to_the_builders(state: DiffusionModelState, mode: CUDAGraphMode) -> None:
    assert prepare(state, mode)["window_rules"].spans is None
    buffer = torch.zeros(100, 2, dtype=torch.int32)
    state.image_spans = lambda *_: buffer  # type: ignore[method-assign]
    metadata = prepare(state, mode)
    spans = metadata["window_rules"].spans
    assert spans.data_ptr() == buffer.data_ptr() and len(spans) == metadata["num_tokens"]


OTHERS = [[24, 28]] * 2 + [[28, 32]] * 2  # spans of the second request, in blocks of C
MASKED: dict[str, tuple[type[MaskedModelState], dict[str, Any], list[int], list[list[int]]]] = {
    # Of two requests, the first verifies a draft: the class, its step, `causal`, and spans.
    "blocks": (MaskedModelState, {"block_length": C}, [C, C], [[16, 20]] * C + OTHERS),
    # Its rows see no later ones.
    "drafts": (
        *(ShiftedModelState, {"block_length": C, "verifying_causal": 1}, [1, C]),
        [[i, i + 1] for i in range(16, 16 + C)] + OTHERS,
    ),
    "drafts in a copy of two tokens": (
        *(DraftingModelState, {"block_length": 2, "verifying_causal": -2}, [-2, 2]),
        [[0, 17], [0, 18], [0, 16], [0, 17]] + [[26, 28]] * 2 + [[28, 30]] * 2,
    ),
}


@pytest.mark.parametrize("runs_fa4", [False, True])
@pytest.mark.parametrize("kind", MASKED)
def test_rows_of_masked_models(state: DiffusionModelState, kind: str, runs_fa4: bool) -> None:
    """FlashAttention-4 is told of blocks as of images, in a buffer that stays."""
    state_cls, of_step, causal, expected = MASKED[kind]
    masked = state_cls.__new__(state_cls)
    vars(masked).update(vars(state))
    vars(masked.step).update(of_step, may_verify=lambda batch: True)
    masked.step.verifies = lambda slots: torch.tensor([True, False])
    masked._block_spans = torch.zeros(100, 2, dtype=torch.int32) if runs_fa4 else None
    metadata = prepare(masked, CUDAGraphMode.NONE)
    spans, verifying = metadata["window_rules"].spans, of_step.get("verifying_causal")
    if masked._block_spans is None:
        assert metadata["causal"].tolist() == causal and spans is None
    else:
        assert metadata["causal"].tolist() == [verifying or 1, 1]
        assert spans.data_ptr() == masked._block_spans.data_ptr()
        assert spans.tolist() == expected


def test_stock_builders_are_not_given_what_they_do_not_take() -> None:
    assert not takes_window_rules(object())


class Runner:
    """Persistent buffers as the model runner has them: two requests, two KV cache groups."""

    def __init__(self) -> None:
        self.latest = LatestMetadata()
        self.built = 0
        self.query_start_loc = np.array([0, 64, 128], dtype=np.int32)
        self.seq_lens = torch.tensor([100, 90], dtype=torch.int32)
        self.tables = [torch.zeros(2, 4, dtype=torch.int32) for _ in range(2)]
        self.causal = torch.zeros(2, dtype=torch.int32)
        self.symmetric = torch.zeros(2, dtype=torch.int32)
        self.spans = torch.zeros(128, 2, dtype=torch.int32)
        self.slot_mappings = torch.zeros(2, 128, dtype=torch.int64)

    def step(self) -> dict[str, int]:
        requests = AttnRequests(
            is_prompt=np.zeros(2, dtype=bool),
            query_start_loc_np=self.query_start_loc,
            query_start_loc=torch.from_numpy(self.query_start_loc),
            seq_lens=self.seq_lens[:],
            slots=torch.arange(2),
            block_tables=tuple(table[:] for table in self.tables),
            max_query_len=64,
        )
        rules = WindowRules(self.symmetric, self.spans)
        return self.latest.get_or_build(
            self._build, requests, self.causal[:], rules, self.slot_mappings[:]
        )

    def _build(self) -> dict[str, int]:
        self.built += 1
        return {"build": self.built}


def replace_block_table(runner: Runner) -> None:
    runner.tables[1] = runner.tables[1].clone()


CHANGES: dict[str, Callable[[Runner], object]] = {
    "rows": lambda runner: np.put(runner.query_start_loc, 1, 63),
    "length": lambda runner: runner.seq_lens[1].add_(1),
    "page": lambda runner: runner.tables[1][1, 3].add_(1),
    "phase": lambda runner: runner.causal[0].fill_(1),
    "window rule": lambda runner: runner.symmetric[1].fill_(1),
    "image": lambda runner: runner.spans[5].add_(7),
    "no image": lambda runner: setattr(runner, "spans", None),
    "memory": replace_block_table,
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_builds_anew(change: str) -> None:
    runner = Runner()
    assert runner.step() is runner.step()
    CHANGES[change](runner)
    assert runner.step() == {"build": 2} and runner.step() == {"build": 2}


def test_the_slots_that_keys_are_written_to_may_change() -> None:
    runner = Runner()
    runner.step()
    runner.slot_mappings.add_(5)
    assert runner.step() == {"build": 1}


def test_a_failed_build_is_not_remembered() -> None:
    runner = Runner()
    runner._build, build = lambda: 1 // 0, runner._build  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(ZeroDivisionError):
        runner.step()
    runner._build = build  # type: ignore[method-assign]
    assert runner.step() == {"build": 1}


BEGIN, NUM = 1, 4  # marks before an image's tokens; its tokens


def feature(offset: int) -> SimpleNamespace:
    is_embed = torch.tensor([False] * BEGIN + [True] * NUM + [False])
    return SimpleNamespace(mm_position=PlaceholderRange(offset, len(is_embed), is_embed))


def batch(slots: list[int], computed: list[int], scheduled: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        num_reqs=len(slots),
        num_tokens=sum(scheduled),
        idx_mapping_np=np.array(slots),
        num_computed_tokens_np=np.array(computed),
        num_scheduled_tokens=np.array(scheduled),
        query_start_loc_np=np.cumsum([0, *scheduled]),
    )


@pytest.fixture
def rows() -> ImageRows:
    """Slot 2 has images at 3..7 and 9..13, slot 5 one at 1..5, the others none."""
    rows = ImageRows(max_num_reqs=8, max_num_tokens=64, device=torch.device("cpu"))
    rows.add_request(2, [feature(2), feature(8)])
    rows.add_request(5, [feature(0)])
    rows.add_request(3, [])
    return rows


def test_rows_of_a_mixed_batch(rows: ImageRows) -> None:
    spans = rows.spans(batch([3, 2, 0, 5], [0, 2, 10, 0], [3, 9, 4, 7]))
    assert spans is not None
    text = (0, 0)
    expected = [text] * 3  # slot 3
    # Slot 2, from position 2 on: mark, image, two marks, the first tokens of the next image.
    expected += [text, *[(3, 7)] * 4, text, text, *[(9, 13)] * 2]
    expected += [text] * 4  # slot 0
    expected += [text, *[(1, 5)] * 4, text, text]  # slot 5
    assert spans.tolist() == [list(span) for span in expected]
    assert spans.dtype == torch.int32


def test_a_part_that_begins_inside_an_image_has_its_whole_span(rows: ImageRows) -> None:
    spans = rows.spans(batch([2], [5], [3]))
    assert spans is not None and spans.tolist() == [[3, 7], [3, 7], [0, 0]]


@pytest.mark.parametrize(
    ("slots", "computed", "scheduled"),
    [([0, 3], [0, 5], [4, 8]), ([2], [13], [8]), ([2], [0], [3]), ([5], [5], [2])],
    ids=["no images", "past them", "before them", "behind its only one"],
)
def test_none_without_rows_of_images(
    rows: ImageRows, slots: list[int], computed: list[int], scheduled: list[int]
) -> None:
    assert rows.spans(batch(slots, computed, scheduled)) is None


def test_the_buffer_stays(rows: ImageRows) -> None:
    one = rows.spans(batch([2], [0], [8]))
    other = rows.spans(batch([5], [0], [6]))
    assert one is not None and other is not None and one.data_ptr() == other.data_ptr()


def test_a_slot_forgets_its_request(rows: ImageRows) -> None:
    rows.add_request(2, [])
    rows.remove_request(5)
    assert rows.spans(batch([2, 5], [0, 0], [8, 8])) is None
