"""`reload_weights` and sleep on two ranks. test_reloading.py says what a reload must do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.engine.conftest import Engine
from tests.engine.one_step import FEW_STEPS
from tests.engine.reloads import OPTIONS, answers, incomplete, reload, require_second_weights


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
    options = OPTIONS | {"tensor_parallel_size": 2, "enable_expert_parallel": experts_apart}
    of_second = answers(engine(second, **options).llm, **FEW_STEPS)
    served = engine(first, **options).llm
    of_first = answers(served, **FEW_STEPS)
    require_second_weights(served, second, of_second, **FEW_STEPS)
    bad = incomplete(first, tmp_path / "bad", "model.decoder.norm.weight")
    with pytest.raises(Exception, match=r"no weights for model\.decoder\.norm\.weight"):
        reload(served, bad)
    assert answers(served, **FEW_STEPS) == of_second
    reload(served, first)
    assert answers(served, **FEW_STEPS) == of_first
