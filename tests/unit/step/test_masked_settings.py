"""Settings of a masked model's requests, as a step finds them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from vllm_dllm.denoise.masked import Candidates, reveal_candidates
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.masked_settings import MaskedSlotSettings


@pytest.mark.parametrize("reveals_at_threshold", [False, True])
@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_a_candidate_as_probable_as_the_threshold(
    threshold: float, reveals_at_threshold: bool
) -> None:
    """Revealed or not, as the model's loop has it; the next smaller number never is."""
    settings = MaskedSlotSettings(
        1, 3, torch.device("cpu"), reveals_at_threshold=reveals_at_threshold
    )
    params = SamplingParams(
        extra_args={
            "diffusion_acceptance": "confidence",
            "diffusion_accept_probability": threshold,
        }
    )
    options = RequestOptions.from_sampling_params(params, {})
    request: Any = SimpleNamespace(slot=0, options=options, params=params)
    settings.add(request)
    settings.start()
    batch: Any = SimpleNamespace(slot_index=slice(0, 1))
    rules = settings.of(batch).rules(torch.tensor([0]), torch.tensor([3]), 3)
    exact = np.float32(threshold)
    # The first is the one that each step reveals whatever it is.
    probability = torch.tensor([[2.0, exact, np.nextafter(exact, np.float32(0))]])
    candidates = Candidates(torch.zeros(1, 3, dtype=torch.int64), probability, torch.ones(1, 3))
    found = reveal_candidates(candidates, torch.ones(1, 3, dtype=torch.bool), rules)
    assert found.tolist() == [[True, reveals_at_threshold, False]]
