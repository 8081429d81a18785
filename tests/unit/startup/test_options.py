"""A wrong value of an option ends the start with one line that names it and says what it takes."""

import argparse
import json
from pathlib import Path

import pytest
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_dllm.startup import last_line


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
