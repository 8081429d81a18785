"""The manifests of deploy/, by the schemas of those who read them."""

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.paths import ROOT
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
