"""Attention metadata are kept exactly as long as nothing they are made of changes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_dllm.attention import WindowRules
from vllm_dllm.step.runner.attn_requests import AttnRequests, LatestMetadata


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
