"""Which thresholds a step's canvases have, by the load, against plain Python."""

import pytest
import torch

from vllm_dllm.config.extension import LoadStage
from vllm_dllm.denoise.step import StepRules
from vllm_dllm.step.asked.settings import LoadStages

STAGES = (
    LoadStage(4, stability_threshold=0),
    LoadStage(8, confidence_threshold=0.02, stability_threshold=0),
)
OWN = [(0.005, 1), (0.05, 3), (0.001, 0)]  # confidence, stability of three requests


def expected(num_canvases: int, own: tuple[float, int], allowed: int) -> tuple[float, float]:
    confidence, stability = own
    for stage in STAGES[:allowed]:
        if num_canvases >= stage.canvases:
            confidence = max(confidence, stage.confidence_threshold)
            stability = min(stability, stage.stability_threshold)
    return confidence, stability


@pytest.mark.parametrize("num_canvases", [1, 3, 4, 7, 8, 100])
def test_thresholds_follow_the_load(num_canvases: int) -> None:
    load = LoadStages(STAGES, torch.device("cpu"))
    rows = [(own, allowed) for own in OWN for allowed in (0, 1, 2, 9)]
    rules = StepRules(
        0.1,
        torch.tensor([own[0] for own, _ in rows]),
        torch.tensor([float(own[1]) for own, _ in rows]),
    )
    if reached := load.reached(num_canvases):
        rules = load.loosen(rules, torch.tensor([allowed for _, allowed in rows]), reached)
    want = [expected(num_canvases, own, allowed) for own, allowed in rows]
    torch.testing.assert_close(
        torch.stack((rules.confidence_threshold, rules.stability_threshold), dim=-1),
        torch.tensor(want),
        rtol=0,
        atol=0,
    )
    assert rules.entropy_bound == 0.1


def test_without_stages_none_is_reached() -> None:
    assert LoadStages((), torch.device("cpu")).reached(10**6) == 0
