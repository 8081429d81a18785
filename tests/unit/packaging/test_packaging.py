"""What is installed and deployed: manifests, Dockerfiles and the locked packages name what there
is, attention_kernels is a wheel by itself, and make says what is wrong before it begins."""

import importlib.metadata
import re
import shutil
import sys
import tomllib
import zipfile
from email.parser import Parser
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
from tests.processes import output_of, run
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


PACKAGE = ROOT / "attention_kernels"

# What a PyTorch program would do, and what it must not import.
PROGRAM = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "vllm_dllm"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refused())
import torch
from attention_kernels import chunks, masks, support, tiling
from attention_kernels.api import attention
from attention_kernels.testing import PagedBatch, Request, allowed

requests = [Request(8, 37), Request(8, 37, symmetric=True), Request(5, 3, causal=True)]
batch = PagedBatch.random(requests, num_heads=4, num_kv_heads=2, head_size=32, block_size=16)
right = allowed(batch, scale=0.3, window_left=11)
for impl in ("reference", "triton"):
    right.check(attention(**batch.arguments(), scale=0.3, window_left=11, impl=impl))
print(masks.__file__)
"""


def run_elsewhere(*command: object, **environment: str) -> str:
    return output_of(*command, variables=environment, cwd="/")  # not where the sources are


def project(path: Path) -> dict[str, Any]:
    return tomllib.loads((path / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves its files where it was started."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(PACKAGE, folder / "attention_kernels")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run_elsewhere(*pip, "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_all_modules_and_wants_pytorch_and_triton_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    modules = {name for name in names if ".dist-info/" not in name}
    files = [*PACKAGE.glob("*.py"), PACKAGE / "py.typed"]
    assert modules == {f"attention_kernels/{path.name}" for path in files}
    requires = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert requires == ["torch>=2.13", "triton"]


@pytest.mark.slow
def test_wheel_runs_without_vllm(wheel: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    run_elsewhere(*pip, "--target", tmp_path, wheel)
    output = run_elsewhere(
        *(sys.executable, "-P", "-c", PROGRAM), PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1"
    )
    assert Path(output.strip().splitlines()[-1]) == tmp_path / "attention_kernels" / "masks.py"


def test_tells_the_story_of_vllm_dllm() -> None:
    own, whole = project(PACKAGE), project(ROOT)
    for key in ("version", "requires-python", "license"):
        assert own[key] == whole[key], key
    assert own["dependencies"][0] in whole["dependencies"]
    assert own["optional-dependencies"]["fa4"] == whole["optional-dependencies"]["fa4"]


def test_a_folder_that_is_not_there_ends_serve_before_set_up(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    make = ("make", "-C", tmp_path, "--dry-run")
    (tmp_path / "checkpoints").mkdir()
    for name in ("nope", "checkpoints/nope"):
        refused = run(*make, "serve", f"CHECKPOINT={name}")
        assert refused.returncode == 2 and f"There is no folder '{name}'" in refused.stderr
        assert "pip" not in refused.stdout
    for words in (("serve", "CHECKPOINT=owner/name"), ("lint", "CHECKPOINT=nope")):
        assert "There is no folder" not in run(*make, *words).stderr


def test_a_quiet_server_says_when_it_is_ready() -> None:
    """In the line that README names, which is uvicorn's. vLLM hands it the file, too."""
    config = f"json.load(open({str(ROOT / 'scripts/quiet_log.json')!r}))"
    said = "logging.getLogger('uvicorn.error').info('Application startup complete.')"
    lines = ("import json, logging, logging.config", f"logging.config.dictConfig({config})", said)
    assert "Application startup complete." in run(sys.executable, "-c", "; ".join(lines)).stdout
