"""The bench's own rules, without any engine."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from bench import harness, images, roofline, timeline, workload
from bench.drafter import ALONE, require_same_answers
from bench.drafter_oracle import best_widths
from bench.full_shape import Cell
from bench.full_shape_engine import STOCK
from bench.progress import Progress
from bench.step_split import StepSplit, split_parts
from bench.system import ROOT, System, SystemDied
from tests import tolerances
from tests.paths import CHECKPOINTS
from tests.processes import is_running, wait_for
from vllm_dllm.tools.drafter.reference import load_target
from vllm_dllm.tools.drafter.sequences import complete


def test_spread() -> None:
    assert harness.spread([3.0, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0, "rounds": 3}
    assert harness.spread([1.0, 2.0])["median"] == 1.5
    with pytest.raises(ValueError, match="at least one"):
        harness.spread([])


@pytest.mark.parametrize(
    ("ours", "reference", "refused"),
    [(0.95, 0.98, False), (0.94, 0.98, True), (1.0, 0.9, False), (float("nan"), 0.9, True)],
    ids=["three points below", "four points below", "better", "not a number"],
)
def test_refuses_when_red(ours: float, reference: float, refused: bool) -> None:
    if refused:
        with pytest.raises(harness.Refused) as error:
            harness.require_accuracy(ours, reference, max_points_below=3)
        # A message as exit code: Python prints it and exits with status 1.
        assert "No speed is reported" in str(error.value.code)
    else:
        harness.require_accuracy(ours, reference, max_points_below=3)


def test_json_is_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"bench": "serving", "nested": {"a": [1, 2]}}
    print("a table")
    harness.publish(report, tmp_path / "new" / "serving.json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert json.loads((tmp_path / "new" / "serving.json").read_text()) == report


def test_workloads() -> None:
    from transformers import AutoTokenizer

    checkpoints = ROOT / "checkpoints"
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "diffusiongemma-tiny")
    short = workload.short(tokenizer, checkpoints / "held_out.jsonl")
    long = workload.long(tokenizer, canvas_length=64)
    assert len(short.prompts) >= 128 and len(long.prompts) == 128
    assert all(workload.num_tokens(tokenizer, answer) <= 20 for answer in short.answers)
    assert all(64 < workload.num_tokens(tokenizer, answer) <= 128 for answer in long.answers)
    answers = [tokenizer(answer, add_special_tokens=False).input_ids for answer in short.answers]
    assert short.accuracy(answers[:10]) == 1.0
    assert short.accuracy([answers[1], answers[1]]) == 0.5


@pytest.mark.parametrize("samples_at_once", [False, True])
def test_split_of_a_worker(samples_at_once: bool) -> None:
    import torch
    from torch import nn

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def __init__(self) -> None:
            super().__init__()
            self.self_conditioning = nn.Identity()

        def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Runner:
        model = Model()

    class Worker(StepSplit):
        model_runner = Runner()

        def execute_model(self) -> None:
            self.model_runner.model(self.model_runner.model.self_conditioning(torch.zeros(1)))
            if samples_at_once:
                self.sample_tokens()

        def sample_tokens(self) -> None:
            self.model_runner.model.compute_logits(torch.zeros(1))

    worker = Worker()
    assert worker.num_forwards() == 0
    worker.start_split()
    for _ in range(3):
        worker.execute_model()
        if not samples_at_once:
            worker.sample_tokens()
    steps = worker.stop_split()
    assert len(steps) == 2  # the last one has no end
    for step in steps:
        parts = split_parts(step)
        assert sum(parts.values()) == pytest.approx(step["step"])
        assert all(part >= 0 for part in parts.values())
        names = ("layers", "self_conditioning", "logits", "prepare", "sample")
        assert all(parts[f"{name}_ms"] > 0 for name in names)
    worker.execute_model()
    assert len(worker._split_steps) == 3, "nothing is recorded after stop_split"
    assert worker.num_forwards() == 4


CHILD = """
class Child:
    def __init__(self, times):
        print("engine noise")
        self.times, self.description = times, {"system": "child"}

    def multiply(self, value):
        print("more noise")
        return self.times * value
"""


def test_system_answers_over_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = System("noisy_child:Child", {"times": 2}, tmp_path / "log")
    child.wait()
    assert child.description == {"system": "child"}
    child.pause()
    child.resume()
    assert child.call("multiply", value=21) == 42
    with pytest.raises(SystemDied, match="noisy_child:Child ended"):
        child.call("multiply", value=None)
    child.close()
    assert "noise" in (tmp_path / "log").read_text()


PARENT = """
import sys
from pathlib import Path
from bench.system import System
from tests.processes import HANGS_S, wait_for

child = System("noisy_child:Child", {"times": 2}, Path(sys.argv[1]))
child.wait()
child.pause()
print(child._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_paused_system_ends_when_the_bench_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin and parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    # A signal takes a moment; a group that is not stopped yet would only see its input end.
    wait_for(lambda: child.status() == psutil.STATUS_STOPPED, "the pause of the system")
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(child.pid), "the end of the paused system")


EXPECTED = [[[-0.1, -2.0, -5.0], [-3.0, -0.2, -1.5]]]  # one prompt, two positions, three tokens


def read(off: float) -> list[list[tuple[list[int], list[float]]]]:
    return [[([0, 1], [-0.1, -2.0]), ([1, 2], [-0.2, -1.5 + off])]]


def test_refuses_a_step_that_is_not_transformers() -> None:
    within = tolerances.LOGPROB / 2
    assert images.require_same_step(read(within), EXPECTED) == pytest.approx(within)
    for off in (3 * tolerances.LOGPROB, float("nan")):
        with pytest.raises(harness.Refused, match="behind images"):
            images.require_same_step(read(off), EXPECTED)
    with pytest.raises(ValueError, match="shorter"):
        images.require_same_step(read(0.0), [EXPECTED[0][:1]])


def test_refuses_other_texts() -> None:
    run = {"outputs": [[1, 2], [3]]}
    images.require_same_text({images.OURS: run, images.WITHOUT: dict(run)})
    with pytest.raises(harness.Refused, match="with and without the tower"):
        images.require_same_text({images.OURS: run, images.WITHOUT: {"outputs": [[1, 2], [4]]}})


def test_refuses_other_answers() -> None:
    require_same_answers({ALONE: [[1], [2]], "ours": [[1], [2]]})
    with pytest.raises(harness.Refused, match="ours answers 1 of 2 prompts differently"):
        require_same_answers({ALONE: [[1], [2]], "ours": [[1], [3]]})


def test_no_fixed_width_is_better_than_the_best_of_each_prompt() -> None:
    target, drafter = CHECKPOINTS / "qwen3-tiny-target", CHECKPOINTS / "qwen3-tiny-dflash"
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = workload.every_task(tokenizer, CHECKPOINTS / "held_out.jsonl").prompts[:12]
    answers = complete(load_target(target, "cpu"), prompts, 24)
    found = best_widths(target, drafter, prompts, answers, 15)
    assert len(found["tau_of_fixed"]) == 15
    assert found["tau"] >= max(found["tau_of_fixed"].values()) > 1


def test_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    first = Progress({"seed": 1}, 3, path)
    first.add({"number": 0, "of": "noise"})
    first.add({"number": 2, "of": "noise"})
    with path.open("a") as file:
        file.write('{"number": 1, "o')  # stopped here
    second = Progress({"seed": 1}, 3, path)
    assert [second.has(number) for number in range(3)] == [True, False, True]
    second.add({"number": 1, "of": "trained"})
    third = Progress({"seed": 1}, 3, path)
    assert sorted(outcome["number"] for outcome in third.outcomes) == [0, 1, 2]


def test_outcomes_of_another_setting_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    Progress({"seed": 1, "answers": 3}, 3, path).add({"number": 0})
    with pytest.raises(ValueError, match="other seed"):
        Progress({"seed": 2, "answers": 3}, 3, path)


HEAD = "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT"


def event(name: str, at: float, duration: float) -> dict[str, object]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": duration}


def test_steps_last_from_one_lm_head_to_the_next(tmp_path: Path) -> None:
    events: list[dict[str, object]] = [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 0, "dur": 9}]
    for number in range(5):
        at = 10_000 * number
        events += [event(HEAD, at, 500), event(HEAD, at + 510, 500)]  # two tiles of one product
        events += [
            event("fused_moe_kernel", at + 1010, 3000),
            event("_settle_kernel", at + 4030, 20),
        ]
        events += [event("_attention_kernel", at + 4050, 5950)]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events[::-1]}).encode()))
    found = timeline.summary(timeline.read(path))
    assert found["steps"] == 4 and found["span_ms"] == 10.0 and found["kernels"] == 5
    assert found["idle_ms"] == pytest.approx(0.03) and found["late_ms"] == pytest.approx(0.02)
    assert list(found["by_kind"]) == [
        "attention",
        "experts: products",
        "LM head product",
        "sampler kernels",
    ]
    assert found["by_kind"]["LM head product"] == {"ms": 1.0, "kernels": 2}
    assert sum(each["ms"] for each in found["by_kind"].values()) == pytest.approx(9.97)


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="1 kernels and no step"):
        timeline.summary([event("some_kernel", 0, 1)])


CELLS = list(roofline.reproduced())


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.system} {c.scheme} {c.cell}")
def test_reproduces_what_was_measured(cell: roofline.Reproduced) -> None:
    assert abs(cell.error) <= 0.1


def test_every_measured_step_is_held_against() -> None:
    measured = {
        (scheme, system, cell)
        for scheme in roofline.PEAK
        for system, found in roofline.results("steps.json")[scheme].items()
        for cell in found["cells"]
    }
    assert {(c.scheme, c.system, c.cell) for c in CELLS} == measured
    assert len(measured) == 13


def test_stock_s_steps_with_even_routing_are_within_an_eighth() -> None:
    """They are no part of the model. Ours run other kernels than any that it knows."""
    measured = {(p.scheme, p.cell): p for p in roofline.predictions() if STOCK in p.measured}
    assert len(measured) == 7
    for each in measured.values():
        assert each.ms["stock"] == pytest.approx(each.measured[STOCK], rel=1 / 8)


@pytest.mark.parametrize("scheme", roofline.PEAK)
@pytest.mark.parametrize("system", roofline.SYSTEMS)
def test_no_step_is_below_the_floor_and_more_work_takes_longer(scheme: str, system: str) -> None:
    times = []
    for cell in (Cell(1, 0), Cell(1, 8192), Cell(8, 8192), Cell(32, 65_536)):
        times.append(sum(roofline.step(system, scheme, cell).values()))
        assert times[-1] > roofline.floor_ms(scheme, cell)
    assert times == sorted(times)


@pytest.mark.parametrize("lines", [roofline.measured_lines, roofline.predicted_lines])
def test_the_page_has_its_tables(lines: roofline.Lines) -> None:
    page = (ROOT / "docs" / "evidence" / "step-on-an-h200.md").read_text().splitlines()
    assert [line for line in lines() if line not in page] == []
