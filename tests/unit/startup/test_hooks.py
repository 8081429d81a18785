"""What a server with a drafter gets of ours, and which settings are for no such drafter."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.config.workers import DRAFT_SCHEDULER, DRAFT_WORKER, STOCK_GPU_WORKER
from vllm_dllm.startup import hooks

SETTINGS = {"vllm_dllm": {"drafter": {"width_policy": "acceptance"}}}


def completed(
    architecture: str | None, method: str = "dflash", additional_config: Any = None
) -> tuple[str | None, str]:
    """The scheduler and the worker; `architecture` None: the method has no drafter."""
    drafter = None if architecture is None else SimpleNamespace(architectures=[architecture])
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, draft_model_config=drafter),
        additional_config=additional_config or {},
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        parallel_config=SimpleNamespace(worker_cls=STOCK_GPU_WORKER),
    )
    hooks._set_drafter_classes(config)
    return config.scheduler_config.scheduler_cls, config.parallel_config.worker_cls


def test_dflash_gets_our_scheduler_and_worker() -> None:
    ours = (DRAFT_SCHEDULER, DRAFT_WORKER)
    assert completed("DFlashDraftModel") == ours
    assert completed("DFlashDraftModel", additional_config=SETTINGS) == ours


def test_dflash2_gets_our_worker_and_vllms_scheduler() -> None:
    assert completed("DFlash2DraftModel") == (None, DRAFT_WORKER)


@pytest.mark.parametrize(
    ("architecture", "method", "named"),
    [
        ("DFlash2DraftModel", "dflash", "'dflash' in --speculative-config with a DFlash2DraftMod"),
        ("Qwen3DSparkModel", "dspark", "'dspark' in --speculative-config with a Qwen3DSparkModel"),
        (None, "ngram", "'ngram' in --speculative-config, which drafts as vLLM does"),
    ],
)
def test_other_drafters_take_none_of_its_settings(
    architecture: str | None, method: str, named: str
) -> None:
    assert completed(architecture, method)[0] is None
    with pytest.raises(ValueError, match=named):
        completed(architecture, method, SETTINGS)


def test_without_a_drafter_nothing_is_looked_at() -> None:
    config: Any = SimpleNamespace(
        speculative_config=None,
        additional_config=SETTINGS,
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        parallel_config=SimpleNamespace(worker_cls=STOCK_GPU_WORKER),
    )
    hooks._set_drafter_classes(config)
    assert config.parallel_config.worker_cls == STOCK_GPU_WORKER
