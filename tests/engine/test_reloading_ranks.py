"""`reload_weights` and sleep on two ranks. test_reloading.py says what a reload must do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.engine.conftest import Engine
from tests.engine.one_step import FEW_STEPS, random_ids
from tests.engine.reloads import incomplete, reload, sleep_and_wake
from vllm_dllm.tools.pretrain.tiny import make_tiny_checkpoint

# The longest takes several blocks of the prefix cache.
PROMPTS = [random_ids(length, 256, seed=length) for length in (3, 40, 300)]
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "block_size": 32,
    "tensor_parallel_size": 2,
}


def answers(llm: LLM) -> list[list[int]]:
    """Of two blocks; the second one sees the first one's keys."""
    params = [
        SamplingParams(max_tokens=48, seed=i, ignore_eos=True, extra_args=FEW_STEPS)
        for i in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "experts_apart", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["whole", "split"]
)
def test_each_rank_loads_its_share(
    engine: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    experts_apart: bool,
) -> None:
    """Where weights do not fit, all ranks have their old ones again."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    first, second = (
        make_tiny_checkpoint(tmp_path / name, seed=seed, sliding_window=64, canvas_length=32)
        for seed, name in enumerate(("first", "second"))
    )
    options = OPTIONS | {"enable_expert_parallel": experts_apart}
    of_second = answers(engine(second, **options).llm)
    served = engine(first, **options).llm
    of_first = answers(served)
    assert all(a != b for a, b in zip(of_first, of_second, strict=True))
    reload(served, second)
    assert answers(served) == of_second
    sleep_and_wake(served)
    assert answers(served) == of_second
    bad = incomplete(first, tmp_path / "bad", "model.decoder.norm.weight")
    with pytest.raises(Exception, match=r"no weights for model\.decoder\.norm\.weight"):
        reload(served, bad)
    assert answers(served) == of_second
    reload(served, first)
    assert answers(served) == of_first
