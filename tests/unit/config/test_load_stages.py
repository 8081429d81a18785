"""Stages of load, as a server's settings give them."""

from typing import Any

import pytest

from vllm_dllm.config.extension import ExtensionConfig, LoadStage


def test_what_a_stage_leaves_out_it_loosens_nothing_of() -> None:
    config = ExtensionConfig.from_additional_config(
        {"vllm_dllm": {"load_stages": [{"canvases": 8, "stability_threshold": 0}]}}
    )
    assert config.load_stages == (LoadStage(8, stability_threshold=0),)
    assert config.load_stages[0].confidence_threshold == 0


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"canvases": 8}, "load_stages must be a list, each an object with the keys"),
        ([{"stability_threshold": 0}], "load_stages.0.canvases is missing. It must be an integer"),
        ([{"canvases": 8, "steps": 1}], "load_stages.0.steps is not known. Known are: .*canvases"),
        ([{"canvases": 0}], "load_stages.0.canvases must be an integer >= 1"),
        ([{"canvases": 8, "confidence_threshold": -1}], "a number >= 0 and <= 1e.06, got -1"),
        ([{"canvases": 8, "confidence_threshold": "much"}], "got 'much'"),
        (
            [{"canvases": 8, "stability_threshold": 0.5}],
            "stability_threshold must be an integer >= 0 .* got 0.5",
        ),
        ([{"canvases": 8}, {"canvases": 8}], "with more canvases than the one before"),
        (
            [{"canvases": 8, "stability_threshold": 0}, {"canvases": 9, "stability_threshold": 1}],
            "no tighter threshold",
        ),
        (
            [
                {"canvases": 8, "confidence_threshold": 0.02},
                {"canvases": 9, "confidence_threshold": 0.01},
            ],
            "no tighter threshold",
        ),
    ],
)
def test_what_is_refused(section: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ExtensionConfig.from_additional_config({"vllm_dllm": {"load_stages": section}})
