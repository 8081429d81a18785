"""Whatever requests ask for, the host waits neither when they come nor in their steps, and no
kernel is compiled for them, but for some of `LATE` before vLLM 0.33."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import chores
from tests.cuda_build.machine import H100
from vllm_dllm.compat import version

CANVAS = list(range(300, 556))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seeded": {"seed": 3},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {5: 2.0, 6: -1.0}},
    "allowed": {"allowed_token_ids": [301, 302, 303]},
    "early stops": {"min_tokens": 5, "stop_token_ids": [307, 308]},
    "log-probabilities": {"logprobs": 5},
    "log-probabilities of the prompt": {"prompt_logprobs": 2},
    "chosen log-probabilities": {"logprob_token_ids": [304, 305]},
    "narrow": {"diffusion_canvas_length": 64},
    "a canvas of its own": {"diffusion_seed_canvas": CANVAS, "diffusion_pinned": [0, 3]},
    "a prediction": {"diffusion_prediction": CANVAS, "stop_token_ids": [307]},
    "symmetric": {"diffusion_window_rule": "symmetric"},
    "revealing": {"diffusion_acceptance": "top_k", "diffusion_accept_tokens": 2},
    "confident": {"diffusion_acceptance": "confidence"},
    "few steps": {"diffusion_max_steps": 2},
    "answer only": {"diffusion_judge_answer_only": 1, "stop_token_ids": [307]},
    "under load": {"diffusion_load_stages": 1},
    "read-only": {"diffusion_read_only": 1, "logprobs": 2},
    "constrained": {"diffusion_constrained": 1, "logprob_token_ids": [301, 302]},
    "several answers": {"n": 2},
}

LATE = {f"_topp_sb_{part}_kernel" for part in ("stats", "step", "mask")}
"""Kernels of vLLM's of which the warm-up compiles some variants: with vLLM 0.32 they depend on how
many rows `top_p` is applied to at once. Since 0.33 they do not, with a vocabulary as large as
DiffusionGemma's."""


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "one by one"])
def test_nobody_waits(on_host: Callable[..., Any], folder: Path, ahead: bool) -> None:
    found = on_host(H100, chores.serve_kinds, folder=folder, kinds=KINDS, ahead=ahead)
    for name in ("waits", "forbidden"):
        seen = {kind: getattr(report, name) for kind, report in found.items()}
        assert {kind: each for kind, each in seen.items() if each} == {}, name
    allowed = set() if version.is_at_least("0.33") else LATE
    late = {kind: set(report.compiled_late) - allowed for kind, report in found.items()}
    if ahead:  # a GPU's default
        assert {kind: each for kind, each in late.items() if each} == {}
