"""A random target and its drafters, one of which is half-trained: it is right now and then."""

import random
from pathlib import Path

import pytest
import torch

from checkpoints.recipes.drafter.tiny import make_tiny_drafter, make_tiny_target
from vllm_dllm.tools.drafter.fit import TrainingOptions, fit
from vllm_dllm.tools.drafter.reference import (
    DFlashDrafter,
    Target,
    load_drafter,
    load_target,
    save_drafter,
)
from vllm_dllm.tools.drafter.sequences import KnownSequence, complete


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return load_target(target_folder, "cpu")


@pytest.fixture(scope="session")
def drafter_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter") / "dflash", target_folder)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(7, 490) for _ in range(rng.randint(3, 20))] for _ in range(12)]


@pytest.fixture(scope="session")
def half_trained_folder(
    target: Target,
    drafter_folder: Path,
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("half-trained") / "dflash"
    drafter = load_drafter(drafter_folder).train()
    answers = complete(target, prompts, max_tokens=24)
    sequences = [KnownSequence(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]
    fit(target, drafter, sequences, TrainingOptions(block_size=8, steps=12), folder)
    save_drafter(drafter, folder, torch.float32)
    return folder


@pytest.fixture
def half_trained(half_trained_folder: Path) -> DFlashDrafter:
    return load_drafter(half_trained_folder)
