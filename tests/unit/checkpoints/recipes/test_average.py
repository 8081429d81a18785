"""The mean of two stages' weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.recipes.average import WEIGHTS, average


def checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(folder.name)
    return folder


def test_mean_in_the_weights_type(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", {"w": torch.tensor([1.0, 2.0]).bfloat16()})
    other = checkpoint(tmp_path / "other", {"w": torch.tensor([5.0, 0.0]).bfloat16()})
    average(one, other, 0.75, tmp_path / "mean")
    found = load_file(tmp_path / "mean" / WEIGHTS)["w"]
    assert found.dtype == torch.bfloat16 and found.tolist() == [4.0, 0.5]
    assert (tmp_path / "mean" / "config.json").read_text() == "other"


def test_of_one_model_only(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", {"w": torch.zeros(2)})
    other = checkpoint(tmp_path / "other", {"w": torch.zeros(2), "v": torch.zeros(2)})
    with pytest.raises(ValueError, match="only one has v"):
        average(one, other, 0.5, tmp_path / "mean")
