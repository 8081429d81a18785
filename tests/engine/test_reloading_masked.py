"""`reload_weights` and sleep with masked models. test_reloading.py says what a reload must do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.engine.conftest import Engine
from tests.engine.masked import CONFIGS, make_checkpoint
from tests.engine.one_step import random_ids
from tests.engine.reloads import altered, reload, sleep_and_wake

# The longest takes several blocks of the prefix cache.
PROMPTS = [random_ids(length, 256, seed=length) for length in (3, 40, 300)]
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "block_size": 32}


def answers(llm: LLM) -> list[list[int]]:
    """Of two blocks or more; the second one sees the first one's keys."""
    params = [SamplingParams(max_tokens=48, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_masked_models(engine: Callable[..., Engine], tmp_path: Path, architecture: str) -> None:
    first, _ = make_checkpoint(tmp_path / "first", 16, architecture)
    second = altered(first, tmp_path / "second")
    of_second = answers(engine(second, **OPTIONS).llm)
    served = engine(first, **OPTIONS).llm
    of_first = answers(served)
    assert all(a != b for a, b in zip(of_first, of_second, strict=True))
    reload(served, second)
    assert answers(served) == of_second
    sleep_and_wake(served)
    assert answers(served) == of_second
    reload(served, first)
    assert answers(served) == of_first
