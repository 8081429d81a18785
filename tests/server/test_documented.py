"""The commands and programs of the documentation do what a reader expects of them.

`tests/documented.py` has the table; only what takes long is cut short.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import LLMEngine, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.documented import CLIENTS, MAKE, SERVERS, TINY, TOOLS
from tests.documents import programs
from tests.engines import in_this_process
from tests.paths import CHECKPOINTS, ROOT
from tests.processes import output_of, run
from tests.server.conftest import Server
from vllm_dllm import cli

MAKES_OWN = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
NUM_PROMPTS = 12  # of the 128 that the documented commands name


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("target", MAKE)
def test_make_runs_what_is_tested_below(target: str) -> None:
    # By itself, even where `make` runs the tests: make hands its options on, and announces folders.
    environment = {name: value for name, value in os.environ.items() if name not in MAKES_OWN}
    shown = run("make", "--dry-run", *target.split()[1:], env=environment)
    last = shown.stdout.replace("\\\n", " ").strip().splitlines()[-1]
    assert shlex.split(last) == shlex.split(MAKE[target]), shown.stderr


@pytest.fixture(scope="module")
def few_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "calibration.jsonl"
    lines = (CHECKPOINTS / "calibration.jsonl").read_text().splitlines()
    path.write_text("\n".join(lines[:: len(lines) // NUM_PROMPTS]) + "\n")
    return path


@pytest.mark.parametrize("command", TOOLS)
def test_tool(command: str, few_prompts: Path, tmp_path: Path) -> None:
    here = command.replace("/tmp/", f"{tmp_path}/")  # first: the prompts may lie there, too
    cheap = here.replace("checkpoints/calibration.jsonl", str(few_prompts))
    program, *arguments = shlex.split(cheap)
    assert program == ".venv/bin/vllm-dllm"
    assert cli.main(arguments) == 0
    written = [path.name for path in tmp_path.iterdir()]
    assert written == ([TOOLS[command]] if TOOLS[command] else [])


@pytest.fixture
def parser() -> Iterator[FlexibleArgumentParser]:
    with in_this_process():
        yield make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("command", SERVERS)
def test_server_options(command: str, parser: FlexibleArgumentParser) -> None:
    """The engine that `vllm serve` would start, without its processes and the compiler."""
    program, serve, model, *options = shlex.split(command)
    assert (program, serve) == (".venv/bin/vllm", "serve")
    arguments = parser.parse_args(["--model", model, *options, "--enforce-eager"])
    engine = LLMEngine.from_engine_args(AsyncEngineArgs.from_cli_args(arguments))
    tokenizer = engine.get_tokenizer()
    chat = [{"role": "user", "content": "Sort: q d x a"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=32))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].text == "a d q x"


def at(server: Server, text: str) -> str:
    """With the address and the model of a server that runs."""
    there = text.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
    return there.replace(f'"model": "{TINY}"', f'"model": "{server.model}"')


@pytest.mark.parametrize("command", CLIENTS)
def test_request(command: str, server: Server) -> None:
    answer = json.loads(output_of(*shlex.split(at(server, command)), "--silent", "--show-error"))
    assert answer["choices"][0]["message"]["content"] == "a d q x", answer


def test_client_program(server: Server) -> None:
    texts = {p.text for p in programs() if p.text.startswith("from openai import OpenAI")}
    for text in texts:
        assert output_of("-c", at(server, text)) == "a d q x\n"


def require_a_decision(server: Server) -> None:
    """That the documented program makes one."""
    (text,) = (p.text for p in programs() if p.text.startswith("import math"))
    assert re.fullmatch(r"a (9\d|100)%\n", output_of("-c", at(server, text)))


def test_decision_program(server: Server) -> None:
    require_a_decision(server)


def test_offline_program(tmp_path: Path) -> None:
    texts = {p.text for p in programs() if p.text.startswith("from vllm import LLM")}
    for text in texts:
        program = tmp_path / "program.py"
        program.write_text(text.replace("max_model_len", "enforce_eager=True, max_model_len"))
        done = run(sys.executable, program)
        assert done.returncode == 0, done.stderr
        assert "a d q x" in done.stdout.splitlines(), done.stdout
        assert "nanobind" not in done.stderr


def test_bench_starts() -> None:
    """As `make bench` does; measuring takes an hour."""
    assert re.match(r"usage: .*serving", output_of("-m", "bench.serving", "--help"))
