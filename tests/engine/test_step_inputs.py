"""What a step takes over from the step before is what vLLM would prepare for it."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.conftest import Engine, GetEngine, GetTiny, connector
from tests.engine.masked_requests import make
from tests.engine.one_step import random_ids

FEW_BLOCKS = {"num_gpu_blocks_override": 40, "block_size": 32, "max_model_len": 288}


def watch(runner: Any) -> Counter[str]:
    """Compares each step's inputs with vLLM's, made on top of them. Counts steps: those that took
    rows over, and block tables as well."""
    reused = runner.prepare_inputs.__self__
    taken_over: Counter[str] = Counter()
    buffers = runner.input_buffers

    def prepare_inputs(*args: Any) -> Any:
        last = reused._batch
        ours = reused.prepare_inputs(*args)
        taken_over["steps"] += 1
        taken_over["rows"] += last is not None and ours.idx_mapping is last.idx_mapping
        found = copy_of(ours), copy_of(buffers)
        theirs = reused._stock_inputs(*args)
        rows = {"input_ids": ours.num_tokens, "positions": ours.num_tokens}
        assert_equal(found[0], vars(theirs), rows)
        assert_equal(found[1], vars(buffers), rows)
        return ours

    def prepare_attn(batch: Any) -> Any:
        taken_over["block tables"] += reused._block_tables is not None
        tables, slots = reused.prepare_attn(batch)
        found = [each.clone() for each in (*tables, slots)]
        tables, slots = reused._stock_attn(batch)
        for ours, theirs in zip(found, (*tables, slots), strict=True):
            # vLLM 0.33 writes 0 where a sliding window has left a block behind.
            assert ((ours == theirs) | (theirs == 0)).all()
        return tables, slots

    runner.prepare_inputs, runner.prepare_attn = prepare_inputs, prepare_attn
    return taken_over


def copy_of(values: Any) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(values).items()
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any], rows: dict[str, int]) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            end = rows.get(name)
            assert torch.equal(found[name][:end], value[:end]), name
        elif isinstance(value, np.ndarray):
            assert np.array_equal(found[name], value), name
        else:
            assert found[name] == value, name


VERIFIED = {"diffusion_acceptance": "verified"}
CASES: dict[str, dict[str, Any]] = {
    "DiffusionGemma": {},
    "SDAR": {},
    # Their steps change the batch's `logits_indices`: to fewer rows, and to more.
    "SDAR, verified": {"settings": {"blocks_in_flight": 2}, "extra_args": VERIFIED},
    "Nemotron": {},
    "Fast-dLLM": {},
    "LLaDA2.2": {},
}


@pytest.mark.parametrize("case", CASES)
def test_every_step(
    engine: GetEngine, tiny: GetTiny, tmp_path: Path, case: str, is_ahead: bool
) -> None:
    """Of requests that come and go, are preempted, and get cache blocks at different times."""
    family, options = case.partition(",")[0], CASES[case]
    checkpoint = tiny(64) if family == "DiffusionGemma" else make(tmp_path, family, 8).checkpoint
    served = engine(checkpoint, options.get("settings"), async_scheduling=is_ahead, **FEW_BLOCKS)
    reused, taken_over = served.runner.prepare_inputs.__self__, watch(served.runner)
    answer(served, options.get("extra_args"))
    assert 0 < taken_over["block tables"] <= taken_over["rows"] < taken_over["steps"]
    served.llm.collective_rpc("execute_dummy_batch")  # as data-parallel engines do
    assert reused._batch is None


def answer(served: Engine, extra_args: dict[str, Any] | None = None) -> None:
    prompts = [random_ids(n, 400, n) for n in (5, 100, 33, 64, 150, 3, 70)]
    params = [
        SamplingParams(seed=i, max_tokens=20 * (1 + i % 5), ignore_eos=True, extra_args=extra_args)
        for i in range(len(prompts))
    ]
    served.ask(prompts, params)


def test_a_kv_connector_may_have_got_blocks(
    engine: GetEngine, tiny: GetTiny, tmp_path: Path
) -> None:
    """It loads into blocks of requests of which no step knows yet. vLLM 0.33 takes blocks that a
    window has passed out of tables before somebody else writes them."""
    served = engine(tiny(64), **connector(tmp_path), **FEW_BLOCKS)
    taken_over = watch(served.runner)
    answer(served)
    assert taken_over["block tables"] == 0 < taken_over["rows"]
