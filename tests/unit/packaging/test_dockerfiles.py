"""The Dockerfiles, which cannot be built here, name what there is and what is supported."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.paths import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_python_is_supported(dockerfile: Path) -> None:
    versions = set(re.findall(r"^FROM python:([\d.]+)-", dockerfile.read_text(), re.MULTILINE))
    assert versions
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(v) for v in versions)


def test_vllm_for_gpus_is_supported() -> None:
    text = (ROOT / "docker" / "cuda.Dockerfile").read_text()
    (version,) = re.findall(r"^FROM vllm/vllm-openai:v(\S+)$", text, re.MULTILINE)
    (vllm,) = map(Requirement, PROJECT["optional-dependencies"]["cuda"])
    assert vllm.specifier.contains(version)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_not_ignored(dockerfile: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    ignored = {line for line in lines if line and not line.startswith("#")}
    copied = re.findall(r"^COPY (?!--from)(\S+) ", dockerfile.read_text(), re.MULTILINE)
    assert "." in copied
    # What setuptools reads: see pyproject.toml.
    needed = {"pyproject.toml", "README.md", "LICENSE", "vllm_dllm", "attention_kernels"}
    for name in {"checkpoints", *needed, *copied} - {"."}:
        assert (ROOT / name).exists()
        assert name.partition("/")[0] not in ignored, f"{name} is in .dockerignore"


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
