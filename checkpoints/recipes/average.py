"""Averages the weights of two stages of a training run: python -m checkpoints.recipes.average

What the later stage has learnt too much of, at the cost of the rest, is partly taken back; between
two stages of one run, the mean is as good as either (arXiv:2203.05482).
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(earlier: Path, later: Path, share: float, out: Path) -> None:
    """Writes a copy of the checkpoint `later` with `(1 - share) * earlier + share * later`,
    computed in fp32 and rounded to the type of the later weights.

    Raises:
        ValueError: The two have other weights.
    """
    first, second = load_file(earlier / WEIGHTS), load_file(later / WEIGHTS)
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())[0]
        raise ValueError(f"expected two checkpoints of one model, but only one has {odd}.")
    mean = {
        name: torch.lerp(first[name].float(), weight.float(), share).to(weight.dtype)
        for name, weight in second.items()
    }
    with safe_open(later / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    shutil.copytree(later, out, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(mean, out / WEIGHTS, metadata=metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("earlier", type=Path)
    parser.add_argument("later", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="of the later weights")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    average(args.earlier, args.later, args.share, args.out)


if __name__ == "__main__":
    main()
