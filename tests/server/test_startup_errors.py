"""A server that cannot serve ends its start and says what was expected, what came, what to do.

One mistake of each kind; the checks' own tests have the others.
"""

import json
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file, save_file

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.server import conftest
from tests.server.conftest import CHECKPOINT, Complaint
from tests.unit.startup.test_hooks import ENDLESS


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("good"))


Damage = Callable[[Path], None]
DOWN = "model.decoder.layers.1.mlp.down_proj.weight"


def in_json(name: str, change: Callable[[dict], object]) -> Damage:
    def damage(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        change(content)
        (checkpoint / name).write_text(json.dumps(content))

    return damage


def in_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(checkpoint: Path) -> None:
        weights = load_file(checkpoint / "model.safetensors")
        change(weights)
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})

    return damage


def int_zero_points(config: dict) -> None:
    """Another scheme of compressed-tensors': 4-bit integers, asymmetric."""
    scheme = preset_name_to_scheme("W4A16_ASYM", ["Linear"])
    quantization = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized")
    config["quantization_config"] = quantization.model_dump(mode="json")


class Payload:
    """What a pickle may do: anything."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('the pickle was run')",)


def pickled(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Payload()}))


def endless_template(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text(ENDLESS)


def of_ours(**settings: str) -> list[str]:
    return ["--additional-config", json.dumps({"vllm_dllm": settings})]


CASES: dict[str, tuple[Damage | None, list[str], str]] = {
    "generation-config-key": (
        in_json("generation_config.json", lambda config: config.pop("t_min")),
        [],
        "generation_config has no 't_min'",
    ),
    "unknown-stop-token": (
        in_json("generation_config.json", lambda config: config.update(eos_token_id=[1, 10**6])),
        [],
        "eos_token_id in generation_config.json must be a token id, or several, from 0 to ",
    ),
    "int-zero-points": (
        in_json("config.json", int_zero_points),
        [],
        "zero points, got model.decoder.layers.0.self_attn.q_proj.weight_zero_point. FP8_DYNAMIC",
    ),
    "missing-weight": (in_weights(lambda weights: weights.pop(DOWN)), [], DOWN[14:]),
    "weight-of-nan": (
        in_weights(lambda weights: weights[DOWN][3, 5].fill_(float("nan"))),
        [],
        f"at {DOWN} of shape [",
    ),
    "pickled": (
        pickled,
        [],
        "model.safetensors.index.json: expected weights in the safetensors fo",
    ),
    "endless-template": (endless_template, [], "chat_template.jinja must end, got one that was no"),
    "endless-steps-by-option": (
        None,
        ["--diffusion-config", '{"canvas_length": 32, "max_denoising_steps": 1000000000000000000}'],
        "max_denoising_steps must be an integer >= 1 and <= 1048576, got 1000000000000000000",
    ),
    "extension-config-key": (
        None,
        of_ours(window="symmetric"),
        "window is not known. Did you mean window_rule?",
    ),
    "trace-in-no-folder": (
        None,
        of_ours(trace_path="/nowhere/trace.jsonl"),
        "trace_path must be a file that can be written, got '/nowhere/trace.jsonl': No such file",
    ),
}


@pytest.fixture
def broken(request: pytest.FixtureRequest, good: Path, tmp_path: Path) -> Path:
    """The checkpoint of the case that the test is called with."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(good, checkpoint)
    if damage := CASES[request.getfixturevalue("name")][0]:
        damage(checkpoint)
    return checkpoint


@pytest.mark.parametrize("name", CASES)
def test_start_ends_with_a_clear_error(complaint: Complaint, broken: Path, name: str) -> None:
    _, options, message = CASES[name]
    assert message in complaint(broken, *options)


@pytest.mark.parametrize(
    "name", [pytest.param("extension-config-key", marks=pytest.mark.thorough), "missing-weight"]
)
def test_a_server_says_it_last(broken: Path, tmp_path: Path, name: str) -> None:
    """What was found in the process that the user started, and in that of the model."""
    _, options, message = CASES[name]
    log = conftest.last_words(broken, tmp_path / "vllm.log", *options)
    last = log.splitlines()[-1]
    assert last.startswith("Error: ") and message in last
    assert "Traceback" not in log


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        log = conftest.last_words(CHECKPOINT, tmp_path / "vllm.log", "--port", str(port))
    assert log.splitlines()[-1] == (
        f"Error: cannot listen on 127.0.0.1:{port}: Address already in use. Stop the program that "
        f"uses the port, or choose another one with --port."
    )
    assert "Traceback" not in log


def test_a_wrong_folder(tmp_path: Path) -> None:
    """Nothing is asked of a model hub."""
    missing = tmp_path / "checkpoints" / "nope"
    log = conftest.last_words(missing, tmp_path / "vllm.log")
    assert log.splitlines()[-1] == (
        f"Error: There is no model '{missing}': no such folder (there is no "
        f"'{missing.parent}' either). Name the folder of a checkpoint."
    )
    assert "Retrying" not in log and "Traceback" not in log
