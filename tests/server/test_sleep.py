"""A server keeps its weights, sleeps and wakes, over vLLM's own routes."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.server.conftest import CHECKPOINT, UNCOMPILED, Server, serving

pytestmark = pytest.mark.thorough


def ask(server: Server) -> list[str]:
    """Two answers; the first one's prompt takes several blocks of the prefix cache."""
    answers = []
    for question in ("Reverse: " + "rose chair lamp " * 40, "Count from 31 to 69."):
        answers.append(server.chat(question, max_tokens=96, seed=1).choices[0].message.content)
    return answers


def test_a_server_sleeps(tmp_path: Path) -> None:
    options = (*UNCOMPILED, "--max-num-seqs", "4")
    with serving(CHECKPOINT, tmp_path, *options, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        before = ask(server)
        with pytest.raises(urllib.error.HTTPError) as refused:
            json.loads(server.read("/collective_rpc", {"method": "reload_weights"}))
        assert refused.value.code == 500
        assert ask(server) == before

        assert json.loads(server.read("/is_sleeping")) == {"is_sleeping": False}
        for level in (0, 1, 2):
            answer = {"status": "sleeping", "level": level}
            assert json.loads(server.read(f"/sleep?level={level}", {})) == answer
            assert json.loads(server.read("/is_sleeping")) == {"is_sleeping": True}
            late: list[list[str]] = []
            waiting = threading.Thread(target=lambda found: found.append(ask(server)), args=[late])
            waiting.start()
            tags = "?tags=scheduling" if level == 0 else ""
            assert json.loads(server.read(f"/wake_up{tags}", {}))["status"] == "awake"
            assert json.loads(server.read("/is_sleeping")) == {"is_sleeping": False}
            waiting.join()  # it waited, and has its answer
            assert late == [before]
