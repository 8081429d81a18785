"""Other models than the 26B one: masked ones, and one that keeps to a grammar."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import chores
from tests.cuda_build.engine import GRAMMARS, Report
from tests.cuda_build.test_start import IN_PARTS, OURS, require_no_waits
from tests.paths import CHECKPOINTS

REQUESTS = {
    "short": {"prompt": 5, "max_tokens": 20},
    "two blocks": {"prompt": 40, "max_tokens": 50},
    "a prompt in parts": {"prompt": 300, "max_tokens": 20},
}
OPTIONS = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
}
VERIFIED = {"blocks_in_flight": 2, "defaults": {"diffusion_acceptance": "verified"}}
MASKED = [
    "SDARForCausalLM",
    "SDARMoeForCausalLM",
    "LLaDA2MoeModelLM",
    "LLaDA2.2",
    "NemotronLabsDiffusionModel",
    "Fast_dLLM_QwenForCausalLM",
]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *((name, {}) for name in MASKED),
        *(
            (name, settings)
            for name in ("SDARForCausalLM", "LLaDA2MoeModelLM")
            for settings in ({"blocks_in_flight": 2}, VERIFIED)
        ),
    ],
)
def test_masked(
    on_host: Callable[..., Report], folder: Path, architecture: str, settings: dict[str, Any]
) -> None:
    report = on_host(
        IN_PARTS,
        chores.serve_masked,
        folder=folder,
        architecture=architecture,
        requests=REQUESTS,
        options=OPTIONS | {"additional_config": {"vllm_dllm": settings}},
    )
    require_no_waits(report)
    assert report.facts["attention"] == [OURS]
    assert report.graphs > 0 and report.replays > 0
    assert report.tokens == {name: each["max_tokens"] for name, each in REQUESTS.items()}


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        ("SDARForCausalLM", "q_proj k_proj v_proj o_proj up_proj down_proj"),
        ("NemotronLabsDiffusionModel", "q_proj k_proj v_proj o_proj up_proj down_proj"),
        ("LLaDA2MoeModelLM", "query_key_value dense up_proj down_proj"),
    ],
)
def test_adapters(
    on_host: Callable[..., Report], folder: Path, architecture: str, layers: str
) -> None:
    """Of three kinds in a batch: two adapters and none."""
    report = on_host(
        IN_PARTS,
        chores.serve_adapters,
        folder=folder,
        architecture=architecture,
        layers=layers.split(),
        requests=REQUESTS,
        options=OPTIONS,
    )
    require_no_waits(report)
    assert report.facts["attention"] == [OURS]
    assert any("lora" in kernel for kernel in report.kernels)
    assert len(report.tokens) == 3 * len(REQUESTS)


def test_grammars(on_host: Callable[..., Report]) -> None:
    """The host walks a grammar, and waits for what the device found. For nothing else."""
    requests = REQUESTS | {"held": {"prompt": 9, "max_tokens": 40, "regex": r"[\s\S]*"}}
    report = on_host(
        IN_PARTS,
        chores.serve_checkpoint,
        checkpoint=CHECKPOINTS / "diffusiongemma-tiny",
        requests=requests,
        options=OPTIONS,
    )
    others = [wait for wait in report.waits if not any(file in wait for file in GRAMMARS)]
    assert others == [] and report.waits
    assert report.forbidden == []
    assert report.tokens == {name: each["max_tokens"] for name, each in requests.items()}
