"""Denoising settings and stages of load, refused before there is a step, and the folder of a
server's feeds."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import output_of
from vllm_dllm.config import canvas_feeds
from vllm_dllm.config.denoise import DenoiseConfig
from vllm_dllm.config.extension import ExtensionConfig, LoadStage

GOOD: dict[str, Any] = {
    "max_denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
}
NAN, INFINITE = float("nan"), float("inf")
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_denoising_steps": 10**30}, "must be an integer >= 1 and <= 1048576, got 10000"),
    ({"max_denoising_steps": 0}, "max_denoising_steps must be an integer >= 1 and <= .*, got 0"),
    ({"max_denoising_steps": 2.0}, "max_denoising_steps must be an integer .* got 2.0"),
    ({"stability_threshold": 10**25}, "stability_threshold must be an integer >= 0 and <= 1048576"),
    ({"stability_threshold": True}, "stability_threshold must be an integer .* got True"),
    ({"t_min": -0.1}, "t_min must be a number >= 0 and <= 1000, got -0.1"),
    ({"t_min": NAN}, "t_min must be a number .* got nan"),
    ({"t_max": INFINITE}, "t_max must be a number >= 0.001 and <= 1000, got inf"),
    ({"t_min": 0.0, "t_max": 1e-30}, "t_max must be a number >= 0.001 and <= 1000, got 1e-30"),
    ({"t_max": 10**400}, "t_max must be a number .* got 1000"),
    ({"t_max": 0.4}, "t_max must be > t_min = 0.4, got 0.4"),
    ({"confidence_threshold": 0}, "confidence_threshold must be a number > 0 and <= 1e.06, got 0"),
    ({"confidence_threshold": 1e300}, "confidence_threshold must be a number .* got 1e.300"),
    ({"confidence_threshold": "1"}, "confidence_threshold must be a number .* got '1'"),
    (
        {"sampler_config": {**GOOD["sampler_config"], "entropy_bound": INFINITE}},
        "entropy_bound must be a number > 0 and <= 1e.06, got inf",
    ),
    ({"sampler_config": {"_cls_name": "X"}}, "sampler_config must be of kind 'Entropy.*got {'_cls"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(c)[:40] for c, _ in WRONG])
def test_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        DenoiseConfig.from_generation_config(GOOD | changes)
    assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)


def test_at_the_ends() -> None:
    DenoiseConfig.from_generation_config(GOOD)
    DenoiseConfig.from_generation_config(
        GOOD | {"t_min": 0.0, "t_max": 1e3, "stability_threshold": 0}, max_denoising_steps=1 << 20
    )


@pytest.mark.parametrize("key", ["sampling_memory_mib", "self_conditioning_top_k"])
def test_counts_of_the_extension(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be an integer >= 1 and <= 1073741824, got 1"):
        ExtensionConfig.from_additional_config({"vllm_dllm": {key: 10**30}})


@pytest.mark.parametrize("key", ["width", "max_context", "draft_window", "buffer_mib", "load_rows"])
def test_counts_of_a_drafter(key: str) -> None:
    with pytest.raises(ValueError, match=f"drafter.{key} must be an integer >= 1 and <= 10737418"):
        ExtensionConfig.from_additional_config({"vllm_dllm": {"drafter": {key: 10**30}}})


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
            [{"canvases": 8, "stability_threshold": 0}, {"canvases": 9}],
            r'got {"canvases": 9} after {"canvases": 8, "stability_threshold": 0}\. A threshold',
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


def test_a_folder_lasts_as_long_as_the_first_process(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        "import subprocess, sys\n"
        "from vllm_dllm.config import canvas_feeds\n"
        "canvas_feeds.make_socket_folder(sys.argv[1])\n"
        "folder = canvas_feeds.socket_folder()\n"
        "if len(sys.argv) == 2:\n"
        "    subprocess.run([sys.executable, *sys.argv, 'child'], check=True)\n"
        "print(folder, oct(folder.stat().st_mode & 0o777), flush=True)\n"
    )
    base = tmp_path / "base"
    base.mkdir()
    env = {key: value for key, value in os.environ.items() if key != canvas_feeds.FOLDER}
    child, parent = output_of(program, base, env=env).splitlines()
    assert child == parent and parent.startswith(f"{base}/") and parent.endswith(" 0o700")
    assert not list(base.iterdir())


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^VLLM_RPC_BASE_PATH must leave room .* \(107 bytes"):
        canvas_feeds.socket_path(tmp_path / ("x" * 100), canvas_feeds.new_random_name())
