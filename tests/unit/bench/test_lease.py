"""A quarter of an hour on a GPU: what happens to its stages, and how it gets to the host."""

import inspect
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import fused_moe, moe_align_block_size

from bench import full_shape
from bench.full_shape_engine import OURS
from bench.lease import experts, install, linears, pack
from bench.lease.__main__ import Lease, end_session
from bench.lease.stages import MORE, STAGES, Stage
from tests.paths import ROOT
from tests.processes import is_running, output_of, wait_for
from vllm_dllm.compat import fp8_linears
from vllm_dllm.experts import definition, mixture_triton

MINUTES = 15 * 60


def stage(name: str, limit: int = 60, early: int = 0) -> Stage:
    """Whose program is the module of its name, see `write`."""
    return Stage(name, "", [name], [name], seconds=1, limit=limit, early=early)


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lease:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Lease(tmp_path / "out", rehearsing=False)


def write(folder: Path, **programs: str) -> None:
    for name, code in programs.items():
        (folder / f"{name}.py").write_text(code)


def test_stages_go_on_after_one_that_fails_and_results_come_as_they_are(
    lease: Lease, tmp_path: Path
) -> None:
    write(
        tmp_path,
        right="""print('a line'); print('{"ms": 1.5}')""",
        wrong="""print('{"ms": 2}'); raise SystemExit(3)""",
        last="""print('{not JSON')""",
    )
    lease.run([stage(name) for name in ("right", "wrong", "last")])
    found = (lease.out / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in found] == [
        {"stage": "right", "ms": 1.5},
        {"stage": "wrong", "ms": 2},
    ]
    assert sorted(p.name for p in (lease.out / "done").glob("[!.]*")) == ["last", "right"]
    log = (lease.out / "lease.log").read_text()
    assert "wrong: FAILED, status 3" in log and "last: {not JSON" in log


LEAVES_ONE_BEHIND = """
import pathlib, subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
print(left.pid)
time.sleep(10**6)
"""


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(
    lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, slow=LEAVES_ONE_BEHIND, next="print('next')")
    monkeypatch.setattr("bench.lease.__main__.TERM_S", 1)
    lease.run([stage("slow", limit=5), stage("next")])
    log = (lease.out / "lease.log").read_text()
    assert "slow: FAILED: its time is up" in log and "next: done" in log
    (left,) = [int(line.rpartition(" ")[2]) for line in log.splitlines() if line[-1].isdigit()]
    wait_for(lambda: not is_running(left), "the end of what the stage has started")


ENGINE = """
import pathlib, time
turn = pathlib.Path({folder!r}) / "out/done/.turn-{name}"
time.sleep({seconds})
turn.with_name(turn.name + "-ready").touch()
while not turn.exists():
    time.sleep(0.05)
print("in turn", all((turn.parent / f".turn-{{each}}-ready").exists() for each in {others}))
"""


def test_nothing_is_measured_while_an_engine_starts(lease: Lease, tmp_path: Path) -> None:
    others = ["quick", "slow"]
    programs = {
        name: ENGINE.format(folder=str(tmp_path), name=name, seconds=seconds, others=others)
        for name, seconds in (("quick", 0), ("slow", 3))
    }
    write(tmp_path, **programs)
    lease.run([stage("quick", early=1), stage("slow", early=3)])
    log = (lease.out / "lease.log").read_text()
    assert log.count("in turn True") == 2 and log.count(": done") == 2


def test_an_engine_that_ends_keeps_nobody_waiting(lease: Lease, tmp_path: Path) -> None:
    program = ENGINE.format(folder=str(tmp_path), name="quick", seconds=0, others=["quick"])
    write(tmp_path, quick=program, broken="raise SystemExit(1)")
    lease.run([stage("quick", early=1), stage("broken", early=1)])
    log = (lease.out / "lease.log").read_text()
    assert "quick: done" in log and "broken: FAILED, status 1" in log


def test_stages_that_only_check_run_at_once(lease: Lease, tmp_path: Path) -> None:
    meet = """
import pathlib, time
here, other = pathlib.Path({folder!r}) / "{name}", pathlib.Path({folder!r}) / "{other}"
here.touch()
while not other.exists():
    time.sleep(0.05)
"""
    for name, other in (("one", "two"), ("two", "one")):
        write(tmp_path, **{name: meet.format(folder=str(tmp_path), name=name, other=other)})
    lease.run([replace(stage("one", limit=20), with_next=True), stage("two", limit=20)])
    assert (lease.out / "lease.log").read_text().count(": done") == 2


def test_a_second_call_leaves_out_what_is_done(tmp_path: Path) -> None:
    names = {each.name for each in STAGES}
    done = tmp_path / "done"
    done.mkdir()
    for name in names:
        (done / name).touch()
    (tmp_path / "trace-ours-bf16-1x128.json.gz").write_bytes(b"timeline")
    back = tmp_path / "back"
    command = ["bash", "bench/lease.sh", "--out", str(tmp_path), "--for", "1", "--bring", str(back)]
    printed = output_of(*command, cwd=ROOT, variables={"LEASE_SITE": "none"})
    found = json.loads(printed.splitlines()[-1])
    assert set(found["done"]) == names and found["left"] == []
    assert (back / "trace-ours-bf16-1x128.json.gz").read_bytes() == b"timeline"
    with tarfile.open(back / "lease.tar.xz") as packed:
        assert {f"done/{name}" for name in names} <= set(packed.getnames())


def test_the_plan_fits_a_quarter_of_an_hour() -> None:
    """With what else the host takes: 45 s."""
    at = 0
    for each in STAGES:
        at = max(at, each.early) + each.seconds
        assert each.limit >= each.seconds
    assert at <= MINUTES - 45
    assert len({each.name for each in [*STAGES, *MORE]}) == len(STAGES) + len(MORE)


def test_the_plan_names_every_stage() -> None:
    printed = output_of("bash", "bench/lease.sh", "--plan", cwd=ROOT)
    named = {line.split()[0] for line in printed.splitlines() if line[:1].isalpha()}
    assert {each.name for each in [*STAGES, *MORE]} <= named


def test_a_second_start_finds_what_the_first_one_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's key of what it compiles has the folder of the model and the sizes of steps."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stages, found = {each.name: each for each in STAGES}, []
    for name in ("fp8", "fp8-again"):
        monkeypatch.setattr("sys.argv", stages[name].command)
        args = full_shape.read_arguments()
        folder = str(full_shape.write_checkpoint("small", args.scheme))
        found.append(full_shape.commands(args, folder)[OURS])
    assert found[0] == found[1]
    assert (tmp_path / "made-up-small-fp8-dynamic" / "config.json").exists()


@pytest.mark.parametrize("each", [*STAGES, *MORE], ids=lambda each: each.name)
def test_programs_of_stages_exist(each: Stage) -> None:
    for command in (each.command, each.small):
        if command[0] != "pytest":
            assert (ROOT / (command[0].replace(".", "/") + ".py")).exists()
        for word in command[1:]:
            if word.startswith("tests/"):
                assert (ROOT / word).exists()


def test_unpacks_an_archive_when_all_of_its_parts_are_there(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("VALUE = 1")
    tar = tmp_path / "vllm.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add(tmp_path / "module.py", "module.py")
    packed = pack.compress(tar)
    half = packed.stat().st_size // 2
    uploads = {tmp_path / "a": half, tmp_path / "b": packed.stat().st_size}
    pack.split([packed], uploads)
    places = {"LEASE_BUNDLE": str(tmp_path / "bundle"), "LEASE_SITE": str(tmp_path / "site")}
    places["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = []
    for upload in uploads:
        # In a folder of its own: compiling the whole project takes a minute.
        script = (ROOT / "bench" / "lease.sh").read_text().replace("-q -j 16", "-q -j 1 -x .")
        copy = tmp_path / "project" / "bench" / "lease.sh"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(script)
        places["PYTHONPATH"] = str(ROOT)
        said.append(output_of("bash", copy, "--unpack", upload, variables=places))
    assert "vllm: 1 of 2 parts" in said[0] and "vllm: unpacked" in said[1]
    assert (tmp_path / "site" / "module.py").read_text() == "VALUE = 1"


def test_leaves_what_an_installation_would(tmp_path: Path) -> None:
    install.install(tmp_path)
    (info,) = tmp_path.glob("vllm_dllm-*.dist-info")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = (info / "entry_points.txt").read_text()
    for entries in (project["scripts"], *project["entry-points"].values()):
        for name, target in entries.items():
            assert f"{name} = {target}" in written


def test_only_processes_of_the_session_are_ended() -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(10**6)"]
    inside = subprocess.Popen(sleeping, start_new_session=True)
    outside = subprocess.Popen(sleeping, start_new_session=True)
    end_session(inside.pid)
    assert inside.wait() < 0 and outside.poll() is None
    outside.kill()
    outside.wait()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GPU functions of vLLM that only take their arguments as they would; the names of those that
    were called."""
    called: list[str] = []

    def bind(owner: Any, name: str, answer: Callable[..., Any]) -> None:
        signature = inspect.signature(getattr(owner, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return answer(**signature.bind(*args, **kwargs).arguments)

        monkeypatch.setattr(owner, name, call)

    bind(ops, "get_cutlass_moe_mm_problem_sizes_from_expert_offsets", lambda **_: None)
    bind(ops, "cutlass_moe_mm", lambda **_: None)
    bind(ops, "cutlass_scaled_mm", lambda a, b, **_: torch.zeros(len(a), b.shape[1]))
    bind(
        fp8_linears,
        "triton_scaled_mm",
        lambda input, weight, **_: torch.zeros(len(input), weight.shape[1]),
    )
    bind(
        moe_align_block_size,
        "moe_align_block_size",
        lambda topk_ids, block_size, num_experts, **_: definition.sort_by_expert(
            topk_ids, block_size, num_experts
        ),
    )
    bind(mixture_triton, "mix_experts", lambda **_: None)
    bind(experts, "quantise_rows", lambda rows: (rows, torch.ones(len(rows), 1)))
    bind(ops, "scaled_fp8_quant", lambda input, **_: (input, torch.ones(len(input), 1)))
    bind(fused_moe, "fused_experts", lambda hidden_states, **_: hidden_states)
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: torch.zeros(len(a), b.shape[1]))
    return called


def test_experts_call_vllm_s_kernels_as_they_are(bound: list[str]) -> None:
    problem = experts.draw(8, (16, 32, 64, 4), "cpu")
    for name, make in experts.candidates(problem, "cuda"):
        made = make()
        run, off = made if isinstance(made, tuple) else (made, None)
        assert run().shape[1] == 64
        assert (off is not None) == ("products" in name or "rows" in name)
    assert bound.count("cutlass_moe_mm") == 2 and bound.count("fused_experts") == 3
    assert bound.count("quantise_rows") == 2
    assert bound.count("mix_experts") == bound.count("moe_align_block_size") == 2


def test_linears_call_vllm_s_kernels_as_they_are(bound: list[str]) -> None:
    states, weights = torch.ones(4, 32).bfloat16(), [torch.ones(16, 32).bfloat16()] * 2
    names = []
    for name, run in linears.candidates(states, weights, "cuda"):
        assert run().shape == (4, 16)
        names.append(name)
    assert len(names) == 5 and bound.count("cutlass_scaled_mm") == 2
    assert bound.count("triton_scaled_mm") == 1
