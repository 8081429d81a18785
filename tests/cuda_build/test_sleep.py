"""What a sleeping server gives up, nobody reads when it is awake again."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda_build import chores
from tests.cuda_build.engine import Report
from tests.cuda_build.test_start import IN_PARTS
from tests.paths import CHECKPOINTS

REQUESTS: dict[str, dict[str, Any]] = {
    "short": {"prompt": 5, "max_tokens": 20},
    "odd": {"prompt": 40, "max_tokens": 90, "logprobs": 2, "top_k": 5, "presence_penalty": 0.5},
}
DRAFTER = {
    "method": "dflash",
    "model": str(CHECKPOINTS / "qwen3-tiny-dflash"),
    "num_speculative_tokens": 15,
}
MODELS: dict[str, dict[str, Any]] = {
    "diffusiongemma-tiny": {},
    "sdar-tiny": {},
    "qwen3-tiny-target": {
        "speculative_config": DRAFTER,
        "sleep_preserve_parameter_names": ["draft.*"],  # which vLLM does not reload
    },
}


@pytest.mark.parametrize(
    ("model", "level"), [("diffusiongemma-tiny", 1), *((model, 2) for model in MODELS)]
)
def test_nothing_lost_is_read(
    on_host: Callable[..., dict[str, Report]], model: str, level: int
) -> None:
    found = on_host(
        IN_PARTS,
        chores.serve_around_sleep,
        checkpoint=CHECKPOINTS / model,
        level=level,
        requests=REQUESTS,
        options={
            "dtype": "bfloat16",
            "max_model_len": 512,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"},
            **MODELS[model],
        },
    )
    forbidden = sorted(set(found["after"].forbidden))
    assert not forbidden, "\n".join(forbidden)
    assert found["after"].tokens == found["before"].tokens
    assert found["after"].replays > found["before"].replays
