"""Tables of rotary embeddings have a row for each position that a request can reach."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.models.diffusion_gemma import num_rotary_positions

CANVAS = 256  # served, of a checkpoint with shorter ones


def config(max_model_len: int, trained: int = 262_144) -> Any:
    return SimpleNamespace(
        diffusion_config=SimpleNamespace(canvas_length=CANVAS),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            hf_config=SimpleNamespace(canvas_length=64),
            hf_text_config=SimpleNamespace(max_position_embeddings=trained),
        ),
    )


@pytest.mark.parametrize(
    ("max_model_len", "rows"), [(8192, 8192 + CANVAS), (262_000, 262_144), (262_144, 262_144)]
)
def test_a_canvas_more_than_the_context_and_no_more_than_trained(
    max_model_len: int, rows: int
) -> None:
    assert num_rotary_positions(config(max_model_len)) == rows
