"""One measured system = one process, kept alive and asked for round after round.

A system is a class. The child makes one of it, and its methods are what the parent calls. The
parent writes a JSON line for each call and reads one back. The child answers on its own copy of
stdout and sends everything else that is printed there to stderr, because engines are talkative.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Call = Callable[..., Any]

CLOSE_SECONDS = 60.0


class SystemDied(RuntimeError):
    """The child ended, or its handler raised."""


class System:
    """Parent's side of one."""

    def __init__(self, kind: str, settings: Mapping[str, Any], log: Path) -> None:
        """`kind`: "module:class"; `settings`: its arguments, as JSON has them."""
        self.kind = kind
        self._log_path = log
        self._log = log.open("w")
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.system", kind, json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # A child imports torch before vLLM, which sets this: else whoever asks torch whether
            # there is a GPU has called CUDA, and no process forked from then on may use it.
            env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            # A process group of its own, for pause and resume. In the same session, so that if this
            # process is killed the kernel continues and ends the group (SIGHUP, SIGCONT).
            process_group=0,
        )
        self.description: dict[str, Any] = {}
        self.start_seconds = 0.0

    def wait(self, until: float | None = None) -> None:
        """For its start, until `time.monotonic()` is `until`.

        Raises:
            SystemDied: it ended, or has not started by then.
        """
        assert self._process.stdout is not None
        if until is not None:
            patience = max(0.0, until - time.monotonic())
            if not select.select([self._process.stdout], [], [], patience)[0]:
                raise SystemDied(f"{self.kind} did not start in time; {self._end_of_log()}")
        self.description = self._read()
        self.start_seconds = time.monotonic() - self._started

    def call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def pause(self) -> None:
        """Stops all processes of the system, so that an idle one takes nothing from the next."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """All processes of the system."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def close(self) -> None:
        """Ends the child: it leaves its loop when its input ends. One that does not is killed with
        all of its processes."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self.resume()
        self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemDied(f"{self.kind} ended; {self._end_of_log()}")
        return json.loads(line)

    def _end_of_log(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-15:]
        return f"the end of {self._log_path}:\n" + "\n".join(lines)


@contextmanager
def taking_turns(
    commands: Mapping[str, tuple[str, Mapping[str, Any]]],
) -> Iterator[tuple[dict[str, Any], Call]]:
    """Starts systems, given as kinds and settings by name. Yields their descriptions and
    `call(system, method, **arguments)`. All but the one being called are paused."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        systems: dict[str, System] = {}
        for index, (name, (kind, settings)) in enumerate(commands.items()):
            systems[name] = System(kind, settings, logs / f"{index}.log")
            stack.callback(systems[name].close)
            systems[name].wait()
            print(f"{name}: started in {systems[name].start_seconds:.0f} s", flush=True)
            systems[name].pause()

        def call(name: str, method: str, **arguments: Any) -> Any:
            systems[name].resume()
            try:
                return systems[name].call(method, **arguments)
            finally:
                systems[name].pause()

        yield {name: system.description for name, system in systems.items()}, call


def serve(kind: str, settings: str) -> None:
    """Child's side. What a system says of itself is its `description`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = kind.partition(":")
    measured = getattr(import_module(module), name)(**json.loads(settings))
    answers.write(json.dumps(getattr(measured, "description", {})) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        found = getattr(measured, request["call"])(**request["arguments"])
        answers.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    serve(*sys.argv[1:])
