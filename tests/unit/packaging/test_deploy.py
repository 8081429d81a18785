"""The manifests of deploy/, the Dockerfiles, which cannot be built here, and the locked list of
packages name what there is and what is supported."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.paths import ROOT
from vllm_dllm.compat.version import KNOWN
from vllm_dllm.config.extension import ExtensionConfig

DEPLOY = ROOT / "deploy"
KUBERNETES_VERSION = "1.33"
ENDS_WITHIN_S = 9  # docs/serving.md, "Stopping"


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def container() -> dict[str, Any]:
    (deployment,) = (m for m in manifests() if m["kind"] == "Deployment")
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("manifest", manifests(), ids=lambda m: m["kind"])
def test_kubernetes_takes_it(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_names_within_the_manifests_agree() -> None:
    deployment, claim, service = manifests()
    pod = deployment["spec"]["template"]
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= pod["metadata"]["labels"].items()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == volumes.keys()
    claimed = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"]
    ports = {port["name"] for port in container()["ports"]}
    probes = [container()[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["port"] for probe in probes} <= ports
    assert service["spec"]["ports"][0]["targetPort"] in ports


@pytest.mark.parametrize(
    "arguments", [container()["args"], compose()["services"]["server"]["command"]]
)
def test_vllm_takes_the_options(arguments: list[str]) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args(arguments)
    options.model = str(ROOT)  # a name would be looked for on Hugging Face's hub
    assert AsyncEngineArgs.from_cli_args(options).max_model_len == 32768


def test_supervisors_wait_until_a_server_has_ended() -> None:
    needed = ExtensionConfig().drain_seconds + ENDS_WITHIN_S
    deployment = manifests()[0]
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= needed
    grace = compose()["services"]["server"]["stop_grace_period"]
    assert int(re.fullmatch(r"(\d+)s", grace)[1]) >= needed


def test_compose_names_files_that_exist() -> None:
    services = compose()["services"]
    build = services["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    for service in services.values():
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            here = (DEPLOY / source).exists() if source.startswith(".") else None
            assert here or source in compose()["volumes"], mount


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
