"""Runs the stages of `bench/lease.sh`, one after the other, and writes what each finds as it comes.

Standard output and --out/lease.log get a line for each thing that is found; --out/results.jsonl
gets what is JSON. A stage that fails or takes too long is ended, and the next one runs. --out/done
has a file for each that came to its end: a second call leaves those out.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from bench.harness import ROOT
from bench.lease.stages import MORE, STAGES, Stage

SITE = Path(os.environ.get("LEASE_SITE", "/tmp/site"))
MOST_BYTES = 16 << 20  # of a file that is brought back by itself
MOST_TRACES = 6  # that are brought back
REHEARSAL_LIMIT = 900
TERM_S = 5
PATIENCE_S = 240
"""From the beginning until the second upload has to be there."""


class Lease:
    """The state of a lease is the folder `out`."""

    def __init__(self, out: Path, rehearsing: bool) -> None:
        self.out, self.rehearsing, self.begun = out, rehearsing, time.monotonic()
        (out / "done").mkdir(parents=True, exist_ok=True)

    def say(self, stage: str, line: str) -> None:
        """A line for people; what is JSON also lands in results.jsonl."""
        text = f"[{time.monotonic() - self.begun:6.1f}] {stage}: {line}"
        with (self.out / "lease.log").open("a") as file:
            file.write(text + "\n")
        print(text[:300], flush=True)
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                return
            with (self.out / "results.jsonl").open("a") as file:
                file.write(json.dumps({"stage": stage, **found}) + "\n")

    def run(self, stages: list[Stage]) -> None:
        running: dict[str, Running] = {}
        starts = [
            threading.Thread(target=self._start_early, args=(stage, running))
            for stage in stages
            if stage.early and not self.rehearsing
        ]
        for thread in starts:
            thread.start()
        for i, stage in enumerate(stages):
            if not self.wait_for(stage):
                self.say(stage.name, f"left out: {', '.join(stage.needs)} did not come")
                continue
            while stage.early and not self.rehearsing and stage.name not in running:
                time.sleep(0.2)
            found = running.get(stage.name) or Running(self, stage)
            for one, following in pairwise(stages[i:]):
                if not one.with_next or self.rehearsing or following.name in running:
                    break
                if not self.wait_for(following):
                    break
                running[following.name] = Running(self, following)
            if stage.early and not self.rehearsing:
                for thread in starts:
                    thread.join()
                wait_until_ready(list(running.values()))
            limit = REHEARSAL_LIMIT if self.rehearsing else stage.limit
            if found.end_by(time.monotonic() + limit):
                (self.out / "done" / stage.name).touch()
        for early in running.values():
            end_session(early.process.pid)

    def _start_early(self, stage: Stage, running: "dict[str, Running]") -> None:
        if self.wait_for(stage):
            running[stage.name] = Running(self, stage)

    def wait_for(self, stage: Stage) -> bool:
        """For what it needs to be unpacked, soon after the series has begun; whether it is."""
        until = self.begun + PATIENCE_S
        while not self.rehearsing:
            if all((SITE / f".{name}").exists() for name in stage.needs) or not SITE.exists():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        return True


class Running:
    """A stage's program, and a thread that reads what it prints."""

    def __init__(self, lease: Lease, stage: Stage) -> None:
        self.lease, self.stage = lease, stage
        self.turn = lease.out / "done" / f".turn-{stage.name}"
        for file in lease.out.glob(f"done/{self.turn.name}*"):
            file.unlink()
        command = stage.small if lease.rehearsing else stage.command
        if command[0] in ("bench.full_shape", "bench.lease.serve"):
            command = [*command, "--out", str(lease.out / stage.name)]
            if stage.early and not lease.rehearsing:
                command += ["--turn", str(self.turn)]
        lease.say(stage.name, "starts: python -m " + " ".join(command))
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command],
            cwd=ROOT,
            env=os.environ | stage.settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line := line.rstrip():
                self.lease.say(self.stage.name, line)

    @property
    def is_starting(self) -> bool:
        """Whether its engines are."""
        return not self.turn.with_name(f"{self.turn.name}-ready").exists() and (
            self.process.poll() is None
        )

    def end_by(self, until: float) -> bool:
        """Its turn has come: waits for its end until then, and ends it. Whether it did well."""
        self.turn.touch()
        try:
            status = self.process.wait(max(0.0, until - time.monotonic()))
            verdict = "done" if status == 0 else f"FAILED, status {status}"
        except subprocess.TimeoutExpired:
            status, verdict = 1, "FAILED: its time is up"
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(TERM_S)
            except subprocess.TimeoutExpired:
                verdict += ", and it did not end by itself"
        end_session(self.process.pid)
        self.process.wait()
        self.reader.join(TERM_S)
        self.lease.say(self.stage.name, verdict)
        return status == 0


def wait_until_ready(stages: list[Running]) -> None:
    """Until no engine is starting: it would compute and compile beside one that is measured."""
    while any(stage.is_starting for stage in stages):
        time.sleep(0.2)


def end_session(session: int) -> None:
    """All processes that a stage has left."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name, which may have anything in it: state, parent, group, session.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(folder.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile


def plan(stages: Iterable[Stage]) -> None:
    """Prints what is to run, and when it should be done."""
    at = ready = 0
    for stage in stages:
        if stage.early:
            ready = stage.early
            at = max(at, ready)
        at += stage.seconds
        early = f"; its engines start with the first stage, {stage.early} s" if stage.early else ""
        limit = f"at most {stage.limit} s"
        print(f"{stage.name:10} {stage.seconds:4} s, {limit}, done at {at:4} s{early}")
        print(f"{'':11}{stage.shows}")
    print(f"In all {at} s of 900, without the host's start (25 s), uploads and unpacking (20 s)")


def plan_more(stages: Iterable[Stage]) -> None:
    """Prints the stages that have no room in the plan."""
    print("\nWith --only NAME, also:")
    for stage in stages:
        print(f"{stage.name:12} {stage.seconds + stage.early:4} s, {stage.shows}")


def bring_back(out: Path, to: Path) -> None:
    """Packs what was found: the timelines as they are, the rest in one archive."""
    to.mkdir(parents=True, exist_ok=True)
    traces = set(out.rglob("trace-*"))
    with tarfile.open(to / "lease.tar.xz", "w:xz") as archive:
        for path in sorted(set(out.rglob("*")) - traces):
            archive.add(path, path.relative_to(out), recursive=False)
    for path in sorted(traces, key=lambda path: path.stat().st_size)[:MOST_TRACES]:
        if path.stat().st_size < MOST_BYTES:
            stage = "" if path.parent == out else f"{path.parent.name}-"
            (to / f"{stage}{path.name}").write_bytes(path.read_bytes())


def follow(out: Path, series: int | None, until: float, at: int = 0) -> int:
    """Prints what the series in the background says behind the first `at` characters, until it ends
    or time is up. Returns how many characters there are."""
    log = out / "series.txt"
    while True:
        is_last = series is None or not is_running(series) or time.monotonic() >= until
        text = log.read_text(errors="replace") if log.exists() else ""
        print(text[at:], end="", flush=True)
        at = len(text)
        if is_last:
            return at
        time.sleep(0.5)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_series(out: Path, arguments: list[str]) -> int:
    """In a session of its own: it goes on when the call that started it ends."""
    with (out / "series.txt").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "bench.lease", *arguments, "--here"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (out / "series.pid").write_text(str(process.pid))
    return process.pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print the stages and run none")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small shapes")
    names = [stage.name for stage in [*STAGES, *MORE]]
    parser.add_argument("--only", nargs="+", choices=names, help="these, in this order")
    parser.add_argument("--out", type=Path, default=Path("/tmp/lease"))
    parser.add_argument("--for", type=float, default=570, dest="seconds", help="follow so long")
    parser.add_argument("--bring", type=Path, help="then put results into this folder")
    parser.add_argument("--here", action="store_true", help="run in this process, and wait")
    args = parser.parse_args()
    wanted = STAGES
    if args.only:
        by_name = {stage.name: stage for stage in [*STAGES, *MORE]}
        wanted = [by_name[name] for name in args.only]
    if args.plan:
        plan(wanted)
        return None if args.only else plan_more(MORE)
    args.out.mkdir(parents=True, exist_ok=True)
    left = [stage for stage in wanted if not (args.out / "done" / stage.name).exists()]
    if args.here or args.rehearse:
        Lease(args.out, args.rehearse).run(left)
    else:
        until, pid_file = time.monotonic() + args.seconds, args.out / "series.pid"
        series = int(pid_file.read_text()) if pid_file.exists() else None
        at = follow(args.out, series, until)  # what an earlier call has started comes first
        left = [stage for stage in left if not (args.out / "done" / stage.name).exists()]
        if left and (series is None or not is_running(series)):
            only = ["--only", *(stage.name for stage in left)] if args.only else []
            follow(args.out, start_series(args.out, ["--out", str(args.out), *only]), until, at)
    if args.bring:
        bring_back(args.out, args.bring)
    done = sorted(path.name for path in (args.out / "done").glob("[!.]*"))
    print(json.dumps({"done": done, "left": [s.name for s in wanted if s.name not in done]}))


if __name__ == "__main__":
    main()
