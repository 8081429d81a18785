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
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file, save_file

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.server import conftest
from tests.server.conftest import CHECKPOINT, Complaint


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("good"))


def edit_generation_config(checkpoint: Path, change: Callable[[dict], None]) -> None:
    path = checkpoint / "generation_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def no_entropy_bound(checkpoint: Path) -> None:
    edit_generation_config(checkpoint, lambda c: c["sampler_config"].update(entropy_bound=0.0))


def no_t_min(checkpoint: Path) -> None:
    edit_generation_config(checkpoint, lambda c: c.pop("t_min"))


def missing_weight(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.decoder.layers.1.mlp.down_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


def int_zero_points(checkpoint: Path) -> None:
    """Another scheme of compressed-tensors': 4-bit integers, asymmetric."""
    scheme = preset_name_to_scheme("W4A16_ASYM", ["Linear"])
    quantization = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = quantization.model_dump(mode="json")
    (checkpoint / "config.json").write_text(json.dumps(config))


def unknown_stop_token(checkpoint: Path) -> None:
    edit_generation_config(checkpoint, lambda c: c.update(eos_token_id=[1, 10**6]))


def nan_among_weights(checkpoint: Path) -> None:
    """One number."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.decoder.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


class Payload:
    """What a pickle may do: anything."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('the pickle was run')",)


def pickled(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Payload()}))


def pickled_under_another_name(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(pickle.dumps({"weight": Payload()}))


def huge_header(checkpoint: Path) -> None:
    """Of 1 GB; the file has holes, and takes no room."""
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(8 + (1 << 30))


def endless_template(checkpoint: Path) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (checkpoint / "chat_template.jinja").write_text(loops)


CASES = {
    "entropy-bound-0": (
        no_entropy_bound,
        [],
        "entropy_bound must be a number > 0 and <= 1e+06, got 0.0",
    ),
    "generation-config-key": (no_t_min, [], "generation_config has no 't_min'"),
    "missing-weight": (missing_weight, [], "layers.1.mlp.down_proj.weight"),
    "endless-steps-by-option": (
        lambda _: None,
        ["--diffusion-config", '{"canvas_length": 32, "max_denoising_steps": 1000000000000000000}'],
        "max_denoising_steps must be an integer >= 1 and <= 1048576, got 1000000000000000000",
    ),
    "unknown-stop-token": (
        unknown_stop_token,
        [],
        "eos_token_id in generation_config.json must be a token id, or several, from 0 to ",
    ),
    "weight-of-nan": (
        nan_among_weights,
        [],
        "at model.decoder.layers.1.mlp.down_proj.weight of shape [",
    ),
    "pickled": (
        pickled,
        [],
        "model.safetensors.index.json: expected weights in the safetensors fo",
    ),
    "pickled-under-another-name": (
        pickled_under_another_name,
        [],
        "model.safetensors is not a whole safetensors file",
    ),
    "huge-header": (huge_header, [], "model.safetensors is not a whole safetensors file"),
    "endless-template": (endless_template, [], "chat_template.jinja must end, got one that was no"),
    "int-zero-points": (
        int_zero_points,
        [],
        "zero points, got model.decoder.layers.0.self_attn.q_proj.weight_zero_point. FP8_DYNAMIC",
    ),
    "diffusion-config-key": (
        lambda _: None,
        ["--diffusion-config", '{"canvas_length": 32, "stride": 2}'],
        "stride\n  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=2",
    ),
    "token-budget": (
        lambda _: None,
        ["--max-num-batched-tokens", "16"],
        "max_num_batched_tokens must be at least the canvas length, 32 tokens, got 16",
    ),
    "extension-config-key": (
        lambda _: None,
        ["--additional-config", '{"vllm_dllm": {"window": "symmetric"}}'],
        "window is not known. Did you mean window_rule?",
    ),
    "trace-in-no-folder": (
        lambda _: None,
        ["--additional-config", '{"vllm_dllm": {"trace_path": "/nowhere/trace.jsonl"}}'],
        "trace_path must be a file that can be written, got '/nowhere/trace.jsonl': No such file",
    ),
    "pipeline-parallel": (
        lambda _: None,
        ["--pipeline-parallel-size", "2"],
        "pipeline_parallel_size must be 1 for a diffusion model, got 2",
    ),
}


@pytest.fixture
def broken(request: pytest.FixtureRequest, good: Path, tmp_path: Path) -> Path:
    """The checkpoint of the case that the test is called with."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(good, checkpoint)
    CASES[request.getfixturevalue("name")][0](checkpoint)
    return checkpoint


@pytest.mark.parametrize("name", CASES)
def test_start_ends_with_a_clear_error(complaint: Complaint, broken: Path, name: str) -> None:
    _, options, message = CASES[name]
    assert message in complaint(broken, *options)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("extension-config-key", marks=pytest.mark.thorough),
        "missing-weight",
    ],
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
        f"uses the port, or choose another one with --port (and the address with --host)."
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
