"""Loosens thresholds under load: a step of many canvases finishes some of them sooner."""

from bisect import bisect_right
from collections.abc import Sequence

import torch

from vllm_dllm.config.extension import LoadStage
from vllm_dllm.denoise.step import StepRules


class LoadStages:
    """The server's stages of load. The number of canvases in a step says which stages apply. The
    host knows this number, and it is the same on every rank."""

    def __init__(self, stages: Sequence[LoadStage], device: torch.device) -> None:
        self._starts = [stage.canvases for stage in stages]
        # [stages + 1] fp32, by how many stages apply; the first value changes no threshold.
        confidence = [0.0, *(stage.confidence_threshold for stage in stages)]
        stability = [torch.inf, *(float(stage.stability_threshold) for stage in stages)]
        self.confidence = torch.tensor(confidence, device=device)
        self.stability = torch.tensor(stability, device=device)

    def reached(self, num_canvases: int) -> int:
        """Returns how many stages apply to a step of `num_canvases` canvases; 0 if none does."""
        return bisect_right(self._starts, num_canvases)

    def loosen(
        self,
        rules: StepRules,
        allowed: torch.Tensor,  # [n] int64, how many stages each canvas' request allows
        reached: int,  # stages that apply to this step
    ) -> StepRules:
        """Returns the rules of n canvases with loosened thresholds, as tensors [n]. Each threshold
        is the looser one of two: the canvas' own, and that of the last stage that applies to its
        request."""
        stage = allowed.clamp(max=reached)
        return rules._replace(
            confidence_threshold=torch.maximum(
                torch.as_tensor(rules.confidence_threshold), self.confidence[stage]
            ),
            stability_threshold=torch.minimum(
                torch.as_tensor(rules.stability_threshold), self.stability[stage]
            ),
        )
