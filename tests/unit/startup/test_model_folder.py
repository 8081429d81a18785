"""A model that can only be a folder, or that no hub can be asked for, is refused at once."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.engine.arg_utils import EngineArgs

from tests.paths import CHECKPOINTS
from vllm_dllm import plugin
from vllm_dllm.errors import InputError
from vllm_dllm.startup import model_folder
from vllm_dllm.startup.last_line import describe_hub_error
from vllm_dllm.startup.model_folder import (
    check_downloaded_model,
    check_engine_arguments,
    check_model,
)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: two checkpoints in `checkpoints`, and an empty cache of the hub."""
    for name in ("small", "large"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        write(folder, architectures=["Qwen3ForCausalLM"])
        (folder / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "cache").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    for name in ("https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # Neither concerns the hub.
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_connection(*args: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", create_connection)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Machines that were asked."""
    asked: list[tuple[str, int]] = []

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", create_connection)
    return asked


def test_a_wrong_folder_on_a_machine_without_network(clone: Path, no_network: None) -> None:
    with pytest.raises(ValueError) as refusal:
        check_model("checkpoints/nope")
    assert str(refusal.value) == (
        "There is no model 'checkpoints/nope': no such folder ('checkpoints' has large, small), "
        "and the model hub at https://huggingface.co does not answer. Name the folder of a "
        "checkpoint, or connect this machine to the network."
    )


@pytest.mark.parametrize("model", ["./small", "../small", "~/no such folder", "/no/such", "a/b/c"])
def test_what_can_only_be_a_folder_needs_no_network(
    clone: Path, network: list[tuple[str, int]], model: str
) -> None:
    with pytest.raises(ValueError, match=r"^There is no model .* Name the folder of a checkpoint."):
        check_model(model)
    assert not network


def cached(clone: Path) -> str:
    (clone / "cache" / "models--some--model").mkdir()
    return "some/model"


def gguf(clone: Path) -> str:
    (clone / "model.gguf").touch()
    return "model.gguf"


ADMITTED: dict[str, Callable[[Path], str]] = {
    "a folder": lambda clone: "checkpoints/small",
    "a folder, absolute": lambda clone: str(clone / "checkpoints" / "small"),
    "of the cache": cached,
    "a file of one": gguf,
    "in a bucket": lambda clone: "s3://bucket/model",
}


@pytest.mark.parametrize("case", ADMITTED)
def test_what_needs_no_hub_is_left_to_vllm(clone: Path, no_network: None, case: str) -> None:
    check_model(ADMITTED[case](clone))


def test_a_name_is_left_to_the_hub_that_answers(
    clone: Path, network: list[tuple[str, int]]
) -> None:
    check_model("some/model")
    assert network == [("huggingface.co", 443)]


def test_a_model_of_the_cache_whose_hub_does_not_answer(
    clone: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks the hub for minutes, and ends without a word of its cache."""
    said: list[str] = []
    monkeypatch.setattr(
        model_folder.logger, "warning", lambda text, *values: said.append(text % values)
    )
    check_model(cached(clone))
    assert said == [
        "The model hub at https://huggingface.co does not answer. HF_HUB_OFFLINE=1 serves "
        f"'some/model' from {clone / 'cache'} without it."
    ]


def test_a_model_that_the_cache_lacks_offline(
    clone: Path, network: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_model(cached(clone))
    with pytest.raises(ValueError, match=r"cache does not have it, and HF_HUB_OFFLINE is set\. N"):
        check_model("other/model")
    assert not network
    with pytest.raises(LocalEntryNotFoundError) as error:
        snapshot_download("other/model", cache_dir=clone / "cache", local_files_only=True)
    line = describe_hub_error(error.value) or ""
    assert line.startswith(f"{clone / 'cache'} does not have the model, or not all of it, and HF_H")


def test_errors_of_the_hubs_client(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer, and one that does."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(Exception) as error:
        HfApi(endpoint=constants.ENDPOINT).model_info("some/model")
    assert "does not answer. Name the folder of a checkpoint" in (
        describe_hub_error(error.value) or ""
    )
    assert describe_hub_error(ValueError("another")) is None
    error.value.response = object()  # type: ignore[attr-defined]
    assert describe_hub_error(error.value) is None


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
def test_a_proxy_is_not_second_guessed(
    clone: Path, no_network: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "http://proxy:3128")
    check_model("some/model")


def test_the_drafter_and_the_tokenizer_too(clone: Path, no_network: None) -> None:
    drafter = {"method": "dflash", "model": "checkpoints/drafter"}
    with pytest.raises(ValueError, match="There is no model 'checkpoints/drafter'"):
        check_engine_arguments(arguments("checkpoints/small", speculative_config=drafter))
    with pytest.raises(ValueError, match=r"no tokenizer 'nope': no such .*, and the.* --tokenizer"):
        check_engine_arguments(arguments("checkpoints/small", tokenizer="nope"))
    with pytest.raises(ValueError, match=r"no generation-config .* with --generation-config"):
        check_engine_arguments(arguments("checkpoints/small", generation_config="nope"))
    file = "checkpoints/small/config.json"
    with pytest.raises(ValueError, match=r"must be a folder, got .*: name 'checkpoints/small'\."):
        check_engine_arguments(arguments("checkpoints/small", generation_config=file))


def test_a_tokenizer_of_the_hub(clone: Path, network: list[tuple[str, int]]) -> None:
    check_engine_arguments(arguments("checkpoints/small", tokenizer="some/model"))
    assert network == [("huggingface.co", 443)]


def arguments(model: str, **others: Any) -> Any:
    """Of an engine."""
    nones = dict.fromkeys(("revision", "tokenizer", "speculative_config", "hf_overrides"))
    flags = {"skip_tokenizer_init": False, "trust_remote_code": False}
    rest = {"model": model, "generation_config": "auto"}
    return SimpleNamespace(**{**rest, **nones, **flags, **others})


def write(folder: Path, **config: Any) -> str:
    """Writes a checkpoint's config."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_drafter_in_the_place_of_its_target(clone: Path, no_network: None) -> None:
    """Once told to copy the tokenizer that it lacks."""
    (clone / "drafter").mkdir()
    folder = write(clone / "drafter", architectures=["DFlashDraftModel"], dflash_config={})
    with pytest.raises(ValueError, match=r"is a drafter: name the folder of its target, and the"):
        check_engine_arguments(arguments(folder))


def test_a_predictor_in_the_place_of_its_target() -> None:
    """Once told to copy the tokenizer that it lacks."""
    folder = str(CHECKPOINTS / "qwen3-tiny-blockpilot")
    with pytest.raises(ValueError, match=r"is a width predictor: name the folder of its target"):
        check_engine_arguments(arguments(folder))


def test_no_config(clone: Path) -> None:
    (clone / "checkpoints" / "empty").mkdir()
    with pytest.raises(ValueError, match=r"'checkpoints/empty' has no config\.json.*has large, s"):
        check_model("checkpoints/empty")


def test_the_folder_above_and_a_file_below(clone: Path) -> None:
    with pytest.raises(ValueError, match=r"'checkpoints' has no config.*\('checkpoints' has larg"):
        check_model("checkpoints")
    with pytest.raises(ValueError, match=r"small/config.json' is a file: name its folder, 'check"):
        check_model("checkpoints/small/config.json")


BROKEN = {
    "cut short": (b"{", "is not JSON (Expecting property name"),
    "with a BOM": (b"\xef\xbb\xbf{}", "is not JSON (Unexpected UTF-8 BOM"),
    "in another encoding": (b"\xff\xfe{\x00", "is not JSON ('utf-8' codec can't decode"),
    "a list": (b"[]", "must be a JSON object, got []"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config", "tokenizer"])
def test_a_broken_file_is_named(clone: Path, name: str, case: str) -> None:
    content, said = BROKEN[case]
    (clone / "checkpoints" / "small" / f"{name}.json").write_bytes(content)
    with pytest.raises(ValueError) as refusal:
        check_engine_arguments(arguments("checkpoints/small"))
    assert str(refusal.value).startswith(f"checkpoints/small/{name}.json {said}")


def test_a_tokenizer_that_is_empty(clone: Path) -> None:
    (clone / "checkpoints" / "small" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"small/tokenizer.json has no 'model': copy or download"):
        check_engine_arguments(arguments("checkpoints/large", tokenizer="checkpoints/small"))


def test_no_tokenizer(clone: Path) -> None:
    small = "checkpoints/small"
    (clone / small / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"small' has no tokenizer\.json: copy it"):
        check_engine_arguments(arguments(small))
    check_engine_arguments(arguments(small, skip_tokenizer_init=True))
    check_engine_arguments(arguments(small, tokenizer="checkpoints/large"))


def test_an_architecture_that_nobody_knows(clone: Path) -> None:
    """What vLLM says of it is to upgrade transformers."""
    small = write(
        clone / "checkpoints" / "small", architectures=["LLaDAModelLM"], model_type="llada"
    )
    with pytest.raises(ValueError, match=r"is a LLaDAModelLM, which cannot be served.*SDARMoeForC"):
        check_engine_arguments(arguments(small))
    check_engine_arguments(arguments(small, trust_remote_code=True))


def test_an_architecture_of_the_hub_that_nobody_knows(clone: Path) -> None:
    """What vLLM says of it is to trust its code."""
    folder = clone / "cache" / "models--some--model" / "snapshots" / "main"
    folder.mkdir(parents=True)
    write(folder, architectures=["DreamModel"], model_type="Dream")
    model = arguments("some/model")
    check_downloaded_model(arguments("no/model"))
    with pytest.raises(ValueError, match=r"'some/model' is a DreamModel, which .*SDARMoeForCausal"):
        check_downloaded_model(model)
    write(folder, architectures=["Qwen3ForCausalLM"])
    check_downloaded_model(model)


def test_the_hubs_model_is_looked_at_where_vllm_refuses_it(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: EngineArgs) -> None:
        raise ValueError("Please pass the argument `trust_remote_code=True`")

    plugin.register()
    monkeypatch.setattr(EngineArgs, "create_model_config", refuse)
    snapshot = clone / "cache" / "models--some--model" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for architecture, error in (("DreamModel", "is a DreamModel"), ("Qwen3ForCausalLM", "trust_")):
        write(snapshot, architectures=[architecture])
        with pytest.raises(ValueError, match=error):
            EngineArgs("some/model", skip_tokenizer_init=True).create_engine_config()


@pytest.mark.parametrize("config", [{}, {"architectures": None, "model_type": "diffusion_gemma"}])
def test_no_architecture(clone: Path, config: dict[str, Any]) -> None:
    """vLLM lists all that it knows."""
    small = write(clone / "checkpoints" / "small", **config)
    with pytest.raises(ValueError, match=r"small' has no architectures in its config.*SDARMoeForC"):
        check_engine_arguments(arguments(small, trust_remote_code=True))
    named = {"architectures": ["Qwen3ForCausalLM"]}
    check_engine_arguments(arguments(small, hf_overrides=named))


def test_a_drafter_that_names_its_target(clone: Path) -> None:
    """It has neither the target's tokenizer nor an architecture of vLLM's, which serves the
    target."""
    verifier = {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}
    drafter = {"architectures": ["DFlashSpeculator"], "speculators_config": verifier}
    check_engine_arguments(arguments(write(clone / "checkpoints" / "small", **drafter)))


def test_a_target_is_no_drafter(clone: Path) -> None:
    large = write(clone / "checkpoints" / "large", num_hidden_layers=2)
    drafter = {"method": "dflash", "model": large}
    with pytest.raises(InputError, match="is not a DFlash drafter: expected mask_token_id"):
        check_engine_arguments(arguments("checkpoints/small", speculative_config=drafter))


def test_a_drafter_in_the_home_folder_is_read(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(clone / "checkpoints"))
    write(clone / "checkpoints" / "large", num_hidden_layers=2)
    drafter = {"method": "dflash", "model": "~/large"}
    with pytest.raises(InputError, match=r"'~/large' .* is not a DFlash drafter"):
        check_engine_arguments(arguments("checkpoints/small", speculative_config=drafter))
