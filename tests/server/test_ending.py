"""A server that is told to stop gives its requests some time, then an error, and leaves nothing."""

import os
import signal
from pathlib import Path

from tests.processes import HANGS_S, wait_for
from tests.server.conftest import CHECKPOINT, UNCOMPILED, start_serving, stop
from tests.server.open_requests import LONG, OpenRequest, wait_until_unfinished
from tests.server.process_trees import gone

LAST_RESORT = "This process did not end in"


def test_stopping(tmp_path: Path) -> None:
    options = (*UNCOMPILED, "--max-num-seqs", "16")
    process, server = start_serving(CHECKPOINT, tmp_path, *options, settings={"drain_seconds": 1})
    try:
        streams = [OpenRequest(server, LONG | {"stream": True, "seed": i}) for i in range(10)]
        others = [OpenRequest(server, LONG | {"seed": i}) for i in range(10, 20)]
        wait_until_unfinished(server, 20)
        os.kill(process.pid, signal.SIGTERM)
        for stream in streams:
            assert stream.wait().status == 200
            assert stream.chunks[-1]["error"]["code"] == 503
        for other in others:
            assert other.wait().status == 503 and "The server is stopping" in other.text
        process.wait(HANGS_S)
        wait_for(lambda: gone(process))
        log = server.log.read_text()
        assert LAST_RESORT not in log and "Traceback" not in log
    finally:
        stop(process)
