"""A server's weights are replaced, and it sleeps and wakes, over vLLM's own routes."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.server.conftest import CHECKPOINT, UNCOMPILED, Server, serving

pytestmark = pytest.mark.thorough


def call(server: Server, route: str, body: dict[str, Any] | None = None) -> Any:
    """POST, or GET where there is no body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{route}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ask(server: Server) -> list[str]:
    """Two answers; the first one's prompt takes several blocks of the prefix cache."""
    answers = []
    for question in ("Reverse: " + "rose chair lamp " * 40, "Count from 31 to 69."):
        answer = server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=96,
            seed=1,
        )
        answers.append(str(answer.choices[0].message.content))
    return answers


def reload(server: Server, checkpoint: Path) -> None:
    options = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
    assert call(server, "/collective_rpc", options) == {"results": [None]}


def altered(path: Path) -> Path:
    """The shipped weights, with the layers' scalars a little larger."""
    weights = load_file(CHECKPOINT / "model.safetensors")
    for name in weights:
        if name.endswith(".layer_scalar"):
            weights[name] *= 1.05
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_servers_weights(tmp_path: Path) -> None:
    options = (*UNCOMPILED, "--max-num-seqs", "4")
    with serving(CHECKPOINT, tmp_path, *options, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        before = ask(server)
        call(server, "/pause?mode=abort", {})
        reload(server, altered(tmp_path))
        call(server, "/resume", {})
        assert ask(server) != before
        with pytest.raises(urllib.error.HTTPError) as refused:
            reload(server, tmp_path / "nowhere")
        assert refused.value.code == 500
        assert ask(server) != before
        reload(server, CHECKPOINT)
        assert ask(server) == before

        assert call(server, "/is_sleeping") == {"is_sleeping": False}
        for level in (0, 1, 2):
            answer = {"status": "sleeping", "level": level}
            assert call(server, f"/sleep?level={level}", {}) == answer
            assert call(server, "/is_sleeping") == {"is_sleeping": True}
            late: list[list[str]] = []
            waiting = threading.Thread(target=lambda found: found.append(ask(server)), args=[late])
            waiting.start()
            tags = "?tags=scheduling" if level == 0 else ""
            assert call(server, f"/wake_up{tags}", {})["status"] == "awake"
            assert call(server, "/is_sleeping") == {"is_sleeping": False}
            waiting.join()  # it waited, and has its answer
            assert late == [before]
