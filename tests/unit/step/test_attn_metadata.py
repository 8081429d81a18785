"""Attention metadata are kept exactly as long as nothing they are made of changes. Which rows of a
step belong to which image."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from vllm_dllm.attention import WindowRules
from vllm_dllm.step.runner.attn_requests import AttnRequests, ImageRows, LatestMetadata


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
