"""The whole command, with a stand-in for the server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import HANGS_S, is_running, wait_for
from tests.unit.tools.demo.recorded import RECORDED
from tests.unit.tools.stub_server import STUB, write_checkpoint
from vllm_dllm import cli
from vllm_dllm.tools import server_process
from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.questions import PICTURE_QUESTIONS, questions_for
from vllm_dllm.tools.server_process import choose_port


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its server is the stub."""
    folder = write_checkpoint(tmp_path / "model", {})
    (folder / "steps.json").write_text(json.dumps(RECORDED))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # must not be asked
    monkeypatch.setenv("VLLM_PLUGINS", "another,vllm_dllm")

    def command(checkpoint: Path, port: int, *options: str) -> list[str]:
        return [sys.executable, "-c", STUB, str(checkpoint), str(port)]

    monkeypatch.setattr(server_process, "serve_command", command)
    return folder


def asked(checkpoint: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (checkpoint / "asked.jsonl").read_text().splitlines()]


def test_whole_demo(checkpoint: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ask", "first?", "--ask", "second?", "--save-picture", f"{checkpoint}/c.svg"]
    assert cli.main(["demo", str(checkpoint), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("canvas 1  step  3  accepted   4/4") == 2
    assert re.findall(r"^(.*\?|cat|3 steps on 1 canvas, 2 tokens) *", out, re.M) == [
        *("first?", "cat", "3 steps on 1 canvas, 2 tokens"),
        *("second?", "cat", "3 steps on 1 canvas, 2 tokens"),
    ]
    for body in asked(checkpoint):
        assert body["vllm_xargs"] == {"diffusion_stream_canvases": True}
        assert body["plugins"] == "another,vllm_dllm,vllm_dllm_canvas"
    assert "cat" in (checkpoint / "c.svg").read_text()
    port = int(re.search(r"on port (\d+)", out).group(1))
    assert choose_port(port) == port  # nothing listens there any more
    assert not list(temporary.iterdir()), "logs of a good run"


def test_whole_demo_of_a_checkpoint_that_sees(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "config.json").write_text('{"vision_config": {}}')
    (checkpoint / "processor_config.json").write_text("{}")
    assert cli.main(["demo", str(checkpoint), "--save-picture", f"{checkpoint}/c.svg"]) == 0
    expected = [question.message["content"] for question in questions_for(checkpoint)]
    assert [body["messages"][0]["content"] for body in asked(checkpoint)] == expected
    assert drawing.draw_in_shades(PICTURE_QUESTIONS[0].image) in capsys.readouterr().out
    assert "<image" in (checkpoint / "c.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    forever = "import os, time; print(os.getpid(), flush=True); time.sleep(10**6)"
    script = (
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys; from vllm_dllm import cli; from vllm_dllm.tools import server_process; "
        f"server_process.serve_command = lambda *given: [sys.executable, '-c', {forever!r}]; "
        f"sys.exit(cli.main(['demo', {str(tmp_path)!r}]))"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as running:
        wait_for(lambda: any(log.read_text() for log in tmp_path.glob("*/server.log")))
        (log,) = tmp_path.glob("*/server.log")
        wait_for(lambda: log.read_text().endswith("\n"))
        pid = int(log.read_text())
        running.send_signal(number)
        assert running.wait(HANGS_S) == 128 + number
    assert not is_running(pid) and not log.parent.exists()


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"

    def error(*arguments: str) -> str:
        assert cli.main(["demo", *arguments]) == 1
        return capsys.readouterr().err

    assert re.search(r"no folder '.*missing'.* `vllm-dllm checkpoint` prints", error(str(missing)))
    assert "has no config.json" in error(str(tmp_path))
    assert "name one FILE.svg" in error(str(tmp_path), "--save-picture", "canvas.png")
    assert "0 to 5 seconds, got -1" in error(str(tmp_path), "--pace", "-1")
    (tmp_path / "config.json").write_text("{}")
    assert "has no tokenizer.json" in error(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in error(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = error(str(tmp_path), "--port", port)
    assert re.search(rf"cannot listen on port {port} .* leave --port out", message)
    assert "cannot listen on port 70000" in error(str(tmp_path), "--port", "70000")
