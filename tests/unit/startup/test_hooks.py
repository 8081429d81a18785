"""What a start checks and sets: a drafter, wrong warnings, values of options, and a chat template
that never ends."""

import argparse
import errno
import json
import logging
import signal
import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers import launcher
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.paths import CHECKPOINTS
from vllm_dllm.compat import log_lines, startup
from vllm_dllm.compat.log_lines import CLIENT, ENGINE_GONE, WRONG_CPU_WARNINGS, WRONG_WARNINGS
from vllm_dllm.config import canvas_feeds
from vllm_dllm.config.workers import DRAFT_SCHEDULER, DRAFT_WORKER, STOCK_GPU_WORKER
from vllm_dllm.startup import hooks, last_line
from vllm_dllm.startup.model_folder import check_chat_template

SETTINGS = {"vllm_dllm": {"drafter": {"width_policy": "acceptance"}}}


def completed(
    architecture: str | None,
    method: str = "dflash",
    additional_config: Any = None,
    is_v2: bool = True,
    is_adaptive: bool = False,
) -> tuple[str | None, str]:
    """The scheduler and the worker; `architecture` None: the method has no drafter."""
    drafter = None if architecture is None else SimpleNamespace(architectures=[architecture])
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method,
            draft_model_config=drafter,
            enable_adaptive_verification=is_adaptive,
            num_speculative_tokens=15,
        ),
        use_v2_model_runner=is_v2,
        additional_config=additional_config or {},
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        parallel_config=SimpleNamespace(worker_cls=STOCK_GPU_WORKER),
    )
    hooks._set_drafter_classes(config)
    return config.scheduler_config.scheduler_cls, config.parallel_config.worker_cls


def test_dflash_gets_our_scheduler_and_worker() -> None:
    ours = (DRAFT_SCHEDULER, DRAFT_WORKER)
    assert completed("DFlashDraftModel") == ours
    assert completed("DFlashDraftModel", additional_config=SETTINGS) == ours


def test_a_mistake_in_its_settings_is_found_before_the_model_is_loaded() -> None:
    settings = {"vllm_dllm": {"drafter": {"width": 16}}}
    with pytest.raises(ValueError, match=r"drafter.width is 16, but .* drafts 15"):
        completed("DFlashDraftModel", additional_config=settings)


def test_dflash2_gets_our_worker_and_vllms_scheduler() -> None:
    assert completed("DFlash2DraftModel") == (None, DRAFT_WORKER)


@pytest.mark.parametrize("left", [{"is_v2": False}, {"is_adaptive": True}], ids=str)
def test_what_our_classes_do_not_know_is_left_to_vllm(left: dict[str, bool]) -> None:
    """Runner v1 has none of what our worker replaces, and vLLM's adaptive widths are read by rows
    of the whole batch."""
    for architecture in ("DFlashDraftModel", "DFlash2DraftModel"):
        assert completed(architecture, **left) == (None, STOCK_GPU_WORKER)
    with pytest.raises(ValueError, match="which drafts as vLLM does"):
        completed("DFlashDraftModel", additional_config=SETTINGS, **left)


@pytest.mark.parametrize(
    ("architecture", "method", "named"),
    [
        ("DFlash2DraftModel", "dflash", "'dflash' in --speculative-config with a DFlash2DraftMod"),
        ("Qwen3DSparkModel", "dspark", "'dspark' in --speculative-config with a Qwen3DSparkModel"),
        (None, "ngram", "'ngram' in --speculative-config, which drafts as vLLM does"),
    ],
)
def test_other_drafters_take_none_of_its_settings(
    architecture: str | None, method: str, named: str
) -> None:
    assert completed(architecture, method)[0] is None
    with pytest.raises(ValueError, match=named):
        completed(architecture, method, SETTINGS)


def test_without_a_drafter_diffusion_models_alone_are_looked_at() -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(is_diffusion=False),
        speculative_config=None,
        additional_config=SETTINGS,
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        parallel_config=SimpleNamespace(worker_cls=STOCK_GPU_WORKER),
    )
    hooks._set_drafter_classes(config)
    assert config.parallel_config.worker_cls == STOCK_GPU_WORKER
    config.model_config.is_diffusion = True
    with pytest.raises(ValueError, match=r"'drafter' .* a diffusion model, which has no drafter"):
        hooks._set_drafter_classes(config)


@pytest.mark.parametrize(
    ("logger", "named", "is_kept"),
    [
        ("vllm.config.scheduler", "vllm_dllm.scheduling.scheduler.make_scheduler", False),
        ("vllm.config.scheduler", "theirs.Scheduler", True),
        ("vllm.plugins", ["vllm_dllm_canvas"], False),
        ("vllm.plugins", ["vllm_dllm_canvas", "theirs"], True),
        ("vllm.platforms.interface", "VLLM_DLLM_UNKNOWN_VLLM", False),
        ("vllm.platforms.interface", "VLLM_DLLM_UNKNOWN_VLM", True),
    ],
)
def test_of_ours_and_of_others(logger: str, named: object, is_kept: bool) -> None:
    log_lines.drop_wrong_warnings()
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        logging.getLogger(logger).warning(f"{WRONG_WARNINGS[logger]} More.", named)
        logging.getLogger(logger).warning("Another line of %s", named)
    finally:
        logging.getLogger(logger).removeHandler(handler)
    assert [record.msg.startswith("Another") for record in heard] == [False, True][not is_kept :]


@pytest.mark.parametrize("name", WRONG_CPU_WARNINGS)
def test_what_is_wrong_on_cpus_is_not_said(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_lines.drop_wrong_cpu_warnings()
    vllms = find_spec(name)
    assert vllms and vllms.origin and WRONG_CPU_WARNINGS[name] in Path(vllms.origin).read_text()
    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    logger.warning(f"{WRONG_CPU_WARNINGS[name]} More.")
    logger.warning("another")
    assert [record.msg for record in caplog.records] == ["another"]


@pytest.mark.parametrize("has_ended", [False, True], ids=["while it runs", "at its end"])
def test_an_engine_that_ends_with_its_program_is_expected_to(
    has_ended: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_lines.drop_wrong_warnings()
    vllms = find_spec(CLIENT)
    assert vllms and vllms.origin and ENGINE_GONE in Path(vllms.origin).read_text()
    main = SimpleNamespace(is_alive=lambda: not has_ended)
    monkeypatch.setattr(log_lines.threading, "main_thread", lambda: main)
    logger = logging.getLogger(CLIENT)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("WARNING", CLIENT):
        logger.warning(ENGINE_GONE)
        logger.warning("another")
    assert [record.msg for record in caplog.records] == [ENGINE_GONE, "another"][has_ended:]


def test_no_room_for_canvases_is_said_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a server; `launcher` is imported above."""
    monkeypatch.setenv(canvas_feeds.FOLDER, str(tmp_path / ("x" * 100)))
    with pytest.raises(ValueError, match=r"^VLLM_RPC_BASE_PATH must leave room .* \(107 bytes"):
        hooks._check_arguments(EngineArgs(str(tmp_path)))


def test_a_port_that_there_is_not() -> None:
    startup.explain_bind_errors(hooks.explain_bind_error)
    with pytest.raises(SystemExit, match=r"^Error: --port must be from 0 to 65535, got 99999\.$"):
        launcher.create_server_socket(("127.0.0.1", 99999), reuse_port=False)


@pytest.mark.parametrize(
    ("host", "error", "remedy"),
    [
        ("127.0.0.1", OSError(errno.EADDRINUSE, "in use"), "Stop the program that uses the port,"),
        ("127.0.0.1", OSError(errno.EACCES, "denied"), "This user may not use the port: choose "),
        ("10.255.1.1", OSError(errno.EADDRNOTAVAIL, "none"), "--host must be an address of this "),
        ("localhos", socket.gaierror(socket.EAI_NONAME, "not known"), "--host must be an address"),
    ],
)
def test_advice_that_fits_the_reason_for_no_port(host: str, error: OSError, remedy: str) -> None:
    """All of them were told to stop the program that uses the port."""
    line = hooks.explain_bind_error(host, 80, error)
    assert line.startswith(f"Error: cannot listen on {host}:80: {error.strerror}. {remedy}"), line


def test_two_servers_that_start_at_once() -> None:
    """Both may bind the port, and the one that is ready last would never get a request."""
    startup.explain_bind_errors(hooks.explain_bind_error)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    first = launcher.create_server_socket(address, reuse_port=False)
    with pytest.raises(SystemExit, match=r"cannot listen on .*: Address already in use\. Stop the"):
        launcher.create_server_socket(address, reuse_port=False)
    first.close()  # as a server that still waits for its connections
    everywhere = launcher.create_server_socket(("", address[1]), reuse_port=False)
    with pytest.raises(SystemExit, match="Address already in use"):
        launcher.create_server_socket(("0.0.0.0", address[1]), reuse_port=False)
    everywhere.close()


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = argparse.ArgumentParser._get_value
    monkeypatch.setattr(argparse.ArgumentParser, "_get_value", stock)  # put back at the end
    last_line.check_option_values()
    last_line.check_option_values()


def said(parser: FlexibleArgumentParser, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        parser.parse_args([*words])
    return str(end.value)


@pytest.mark.parametrize("name", last_line.EXAMPLES)
def test_json_that_is_none(parser: FlexibleArgumentParser, name: str) -> None:
    """In two words or in one, and in either spelling; what the error shows is JSON."""
    joined = name.replace("-config", "_config") + "={canvas: 1}"
    expected = f"Error: {name} must be a JSON object such as '"
    for words in ([name, "{canvas: 1}"], [joined]):
        line = said(parser, *words)
        assert line.startswith(expected)
        assert "', got '{canvas: 1}': Expecting property name" in line
    example = line.removeprefix(expected).partition("', got ")[0]
    parsed = parser.parse_args([name, example])
    assert getattr(parsed, name[2:].replace("-", "_")) == json.loads(example)


BYTES = "must be an integer > 0, or one with k, m, g or t (powers of 1000) or K, M, G or T (of 1024"
IN_QUOTES = "must be valid JSON in quotes, got"
CASES = {
    "-sc {x": "--speculative-config must be a JSON object",
    "--diffusion-config 64": "--diffusion-config must be a JSON object such as '{\"can",
    "--additional-config null": "--additional-config must be a JSON object",
    "--limit-mm-per-prompt {image:1}": f"--limit-mm-per-prompt {IN_QUOTES} '{{image:1}}': Exp",
    "--mm-processor-kwargs {x": f"--mm-processor-kwargs {IN_QUOTES} '{{x': Expecting prop",
    "-cc {x": f"--compilation-config {IN_QUOTES} '{{x': Invalid JSON: key must be a string",
    '-cc {"modes":3}': f"--compilation-config {IN_QUOTES} '{{\"modes\":3}}': modes: Unexpected",
    "--kv-transfer-config {x": f"--kv-transfer-config {IN_QUOTES} '{{x': Invalid JSON",
    "--kv-cache-memory-bytes 1GB": f"--kv-cache-memory-bytes {BYTES}), got '1GB'.",
    "--kv-cache-memory-bytes -1": f"--kv-cache-memory-bytes {BYTES}), got '-1'.",
    "--max-num-batched-tokens 1GB": f"--max-num-batched-tokens {BYTES}), got '1GB'.",
    "--uds /nope/s.sock": "--uds must be a path in a folder that is there, got '/nope/s.sock'.",
    "--ssl-certfile /nope.pem": "--ssl-certfile must be a file that can be read, got '/nope.pem'.",
}


@pytest.mark.parametrize("words", CASES)
def test_what_an_option_takes(parser: FlexibleArgumentParser, words: str) -> None:
    assert said(parser, *words.split()).startswith(f"Error: {CASES[words]}")


def test_right_values(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    (tmp_path / "key.pem").touch()
    words = ["--uds", "s.sock", "--ssl-keyfile", str(tmp_path / "key.pem")]
    words += ["--kv-cache-memory-bytes", "16M", "--additional-config.vllm_dllm.x", "true"]
    parsed = parser.parse_args(words)
    assert parsed.kv_cache_memory_bytes == 16 << 20
    assert parsed.additional_config == {"vllm_dllm": {"x": True}}


def test_other_errors_are_vllms(parser: FlexibleArgumentParser) -> None:
    with pytest.raises(argparse.ArgumentError, match="--port: invalid int value: 'x'"):
        parser.parse_args(["--port", "x"])


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def in_a_file(folder: Path, template: str) -> Path:
    (folder / "chat_template.jinja").write_text(template)
    return folder / "chat_template.jinja"


def in_the_tokenizer(folder: Path, template: str) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder / "tokenizer_config.json"


@pytest.mark.parametrize("write", [in_a_file, in_the_tokenizer])
def test_one_that_does_not_end(tmp_path: Path, write) -> None:
    file = write(tmp_path, ENDLESS)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ValueError) as refusal:
        check_chat_template(tmp_path, limit_s=0.2)
    assert str(refusal.value).startswith(
        f"The chat template in {file} must end, got one that was not done with 'Hi' after 0.2 s."
    )
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content }}", "{% if %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"],
)
def test_what_ends_is_left_to_vllm(tmp_path: Path, template: str) -> None:
    in_a_file(tmp_path, template)
    check_chat_template(tmp_path)


def test_a_tokenizer_with_templates_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{}]}')
    check_chat_template(tmp_path)


@pytest.mark.parametrize("name", ["diffusiongemma-tiny", "qwen3-tiny-target"])
def test_ours(name: str) -> None:
    check_chat_template(CHECKPOINTS / name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("- port: 8000\n", ""),
        ("model: x\n port: 8000\n", ": mapping values are not allowed here in "),
        (None, ": [Errno 2] No such file or directory: "),
    ],
)
def test_a_file_of_options_that_is_none(
    parser: FlexibleArgumentParser, tmp_path: Path, text: str | None, reason: str
) -> None:
    """Of an empty one vLLM says that None has no items."""
    file = tmp_path / "options.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(Exception) as raised:
        parser.load_config_file(str(file))
    line = last_line._describe_unforeseen(raised.value)
    expected = f"--config must be a YAML file of options and values, such as 'port: 8000'{reason}"
    assert line.startswith(expected) if reason else line == expected
