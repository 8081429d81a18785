"""The locked list and pyproject.toml must tell the same story."""

import importlib.metadata
import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.paths import ROOT
from vllm_dllm.compat.version import KNOWN

LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def wants(name: str) -> list[Requirement]:
    """What the installed distribution requires here, extras left aside."""
    requires = map(Requirement, importlib.metadata.requires(name) or [])
    return [r for r in requires if r.marker is None or r.marker.evaluate({"extra": ""})]


def test_pins_are_complete_and_agree():
    """--no-deps hides a missing or clashing dependency from pip; this does not."""
    locked = pins()
    for name in locked:
        for requirement in wants(name):
            needed = canonical(requirement.name)
            if needed in LEFT_OUT:
                continue
            assert needed in locked, f"{name} needs {requirement}"
            assert requirement.specifier.contains(locked[needed], prereleases=True), (
                f"{name} needs {requirement}, locked is {locked[needed]}"
            )


def test_pins_are_for_cpu():
    locked = pins()
    assert not LEFT_OUT & locked.keys()
    # FlashAttention-4's compiler needs no GPU; what does would come with CUDA's torch.
    compiler = ("nvidia-cutlass-dsl", "cuda-bindings", "cuda-pathfinder")
    cuda = [name for name in locked if name.startswith(("nvidia-", "cuda-"))]
    assert all(name.startswith(compiler) for name in cuda), cuda
    assert locked["torch"].endswith("+cpu")


def test_pins_cover_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked_extras = (*extras["cpu"], *extras["dev"], *extras["eval"], *extras["fa4"])
    for line in [*project["dependencies"], *locked_extras]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins()[canonical(requirement.name)], prereleases=True)


def test_cuda_extra_takes_the_known_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (vllm,) = map(Requirement, extras["optional-dependencies"]["cuda"])
    newer = Version(KNOWN[-1]).release
    versions = [*KNOWN, f"{newer[0]}.{newer[1] + 1}.0", "0.31.9"]
    assert [v for v in versions if vllm.specifier.contains(v)] == list(KNOWN)
