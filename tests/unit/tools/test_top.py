"""`vllm-dllm top` shows what is on `/metrics`, and says in a line why it cannot."""

import datetime
import io
import ipaddress
import os
import select
import ssl
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console

from tests.processes import HANGS_S
from vllm_dllm import cli
from vllm_dllm.errors import InputError
from vllm_dllm.tools import top
from vllm_dllm.tools.scrape import Scrape, _client, scrape_canvases
from vllm_dllm.tools.top import draw_frame

OF_ENGINE = """\
vllm:num_requests_running{{engine="{engine}",model_name="m"}} 3.0
vllm:num_requests_waiting{{engine="{engine}",model_name="m"}} 1.0
vllm:kv_cache_usage_perc{{engine="{engine}",model_name="m"}} 0.25
vllm:generation_tokens_total{{engine="{engine}",model_name="m"}} {tokens}
vllm_dllm:forwards_total{{engine="{engine}",model_name="m"}} {forwards}
vllm_dllm:denoise_steps_total{{engine="{engine}",model_name="m"}} {forwards}
vllm_dllm:accepted_positions_total{{engine="{engine}",model_name="m"}} 640.0
vllm_dllm:canvases_cut_total{{engine="{engine}",model_name="m"}} 0.0
vllm_dllm:canvases_finished_total{{cause="converged",engine="{engine}",model_name="m"}} 3.0
vllm_dllm:canvases_finished_total{{cause="step_cap",engine="{engine}",model_name="m"}} 1.0
vllm_dllm:commits_total{{engine="{engine}",forward="shared",model_name="m"}} 3.0
vllm_dllm:commits_total{{engine="{engine}",forward="own",model_name="m"}} 1.0
vllm_dllm:requests_total{{acceptance="entropy_bound",engine="{engine}",model_name="m"}} 2.0
vllm_dllm:block_denoise_steps_sum{{engine="{engine}",model_name="m"}} 42.0
vllm_dllm:block_denoise_steps_count{{engine="{engine}",model_name="m"}} 4.0
vllm_dllm:block_entropy_nats_sum{{engine="{engine}",model_name="m"}} 0.002
vllm_dllm:block_entropy_nats_count{{engine="{engine}",model_name="m"}} 4.0
vllm_dllm:block_seconds_sum{{engine="{engine}",model_name="m"}} 2.0
vllm_dllm:block_seconds_count{{engine="{engine}",model_name="m"}} 4.0
"""


Served = tuple[str, dict[str, Callable[[bytes], tuple[int, str]]]]


def scrape(served: Served, text: str, at: float) -> Scrape:
    url, answers = served
    answers["/metrics"] = lambda _: (200, text)
    return Scrape(at, scrape_canvases(url).samples)


def lines(*scrapes: Scrape, problem: str | None = None) -> list[str]:
    screen = Console(file=io.StringIO(), width=100, color_system=None)
    screen.print(draw_frame("http://here", scrapes, problem))
    return [line for line in screen.file.getvalue().splitlines() if line.strip()]


def drawn(*scrapes: Scrape) -> dict[str, list[str]]:
    """The words behind the first column of each line."""
    return {line[:28].strip(): line[28:].split() for line in lines(*scrapes)}


def test_a_frame(served: Served) -> None:
    earlier = scrape(served, OF_ENGINE.format(engine=0, tokens=100, forwards=30), 50.0)
    later = scrape(served, OF_ENGINE.format(engine=0, tokens=160, forwards=40), 54.0)
    shown = drawn(earlier, later)
    assert shown["Requests"] == ["3", "running,", "1", "waiting"]
    assert shown["KV cache"] == ["██████░░░░░░░░░░░░░░░░░░", "25.0%"]
    assert shown["Tokens per second"] == ["15.0", "–"]
    assert shown["Tokens per forward"] == ["6.00", "4.00"]
    assert shown["Denoise steps per block"] == ["–", "10.50"]
    assert shown["Entropy when finished, nats"] == ["–", "0.0005"]
    assert shown["Accepted positions per step"] == ["0.0", "16.0"]
    assert shown["Commits that took no forward"] == ["–", "75%"]
    assert " ".join(shown["Blocks finished by"]) == "converged 75%, step cap 25%"
    assert " ".join(shown["Requests by rule"]) == "entropy bound 100%"
    assert not {"Canvases cut", "Engine  running"} & shown.keys()


def test_several_engines(served: Served) -> None:
    text = "".join(OF_ENGINE.format(engine=i, tokens=160, forwards=40 + i) for i in range(2))
    both = scrape(served, text, 1.0)
    assert drawn(both)["Requests"][0] == "6" and drawn(both)["KV cache"][-1] == "25.0%"
    *_, heading, first, second, last = (line.split() for line in lines(both, problem="gone"))
    assert heading == ["Engine", "running", "waiting", "forwards"]
    assert (first, second) == (["0", "3", "1", "40"], ["1", "3", "1", "41"])
    assert last == ["gone"]


@pytest.mark.parametrize(
    ("status", "text", "complaint"),
    [
        (404, "", "answers /metrics with HTTP 404: it is not vLLM, or --url has a "),
        (200, "<html>", "is not a list of metrics"),
        (
            200,
            "up 1.0\n",
            "has no metrics of vLLM's: it is not vLLM, or was started with --disable-log-",
        ),
        (200, "vllm:x_total 1.0\n", "counts no canvases: it serves no diffusion model, or was"),
    ],
)
def test_other_servers(
    served: Served, capsys: pytest.CaptureFixture[str], status: int, text: str, complaint: str
) -> None:
    url, answers = served
    answers["/metrics"] = lambda _: (status, text)
    assert cli.main(["top", "--url", url, "--once"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("vllm-dllm top: ") and complaint in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1 "),
        ("127.0.0.1:8000", "--url must be like http://127.0.0.1:8000, got '127.0.0.1:8000'"),
        ("http://", "--url must be like"),
        ("http://127.0.0.1:port", "no server answers at"),
    ],
)
def test_no_server(url: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        scrape_canvases(url)


def test_a_certificate_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with `--ssl-certfile`, which no authority has signed."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    path, key_path = tmp_path / "certificate.pem", tmp_path / "key.pem"
    path.write_bytes(certificate.public_bytes(encoding))
    key_path.write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(OF_ENGINE.format(engine=0, tokens=160, forwards=40).encode())

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # ignored
        try:
            for trusted, found in (
                ("", "no server answers"),
                ("/nowhere", "SSL_CERT_FILE and"),
                (str(path), "40"),
            ):
                monkeypatch.setenv("SSL_CERT_FILE", trusted)
                _client.cache_clear()
                try:
                    said = str(scrape_canvases(url).total("vllm_dllm:forwards_total"))
                except InputError as error:
                    said = str(error)
                assert said.startswith(found)
        finally:
            _client.cache_clear()
            server.shutdown()


def test_once(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And wherever the output is no terminal."""
    url, answers = served
    answers["/metrics"] = lambda _: (200, OF_ENGINE.format(engine=0, tokens=160, forwards=40))
    monkeypatch.setattr(top, "REFRESH_SECONDS", 0.0)
    for options in ([], ["--once"]):
        assert cli.main(["top", "--url", url + "/", *options]) == 0
        assert "4.00" in capsys.readouterr().out


def test_q_ends_it(served: Served) -> None:
    """In a terminal, which then is as it was."""
    url, answers = served
    answers["/metrics"] = lambda _: (200, OF_ENGINE.format(engine=0, tokens=160, forwards=40))
    keyboard, terminal = os.openpty()
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "vllm_dllm", "top", "--url", url]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as top_process:
        shown = b""
        while b"Denoise steps" not in shown:
            assert select.select([keyboard], [], [], HANGS_S)[0], shown
            shown += os.read(keyboard, 1 << 16)
        os.write(keyboard, b"xq")
        while top_process.poll() is None:  # it waits until all it wrote is read
            if select.select([keyboard], [], [], 0.1)[0]:
                os.read(keyboard, 1 << 16)
        assert top_process.returncode == 0
    assert termios.tcgetattr(terminal) == before
    os.close(keyboard)
    os.close(terminal)


@pytest.mark.slow
def test_a_server_that_started_anew(served: Served) -> None:
    old, new = (
        scrape(served, OF_ENGINE.format(engine=0, tokens=n, forwards=n), at)
        for n, at in ((40, 1.0), (2, 2.0))
    )
    assert new.has_restarted_since(old) and not old.has_restarted_since(new)
