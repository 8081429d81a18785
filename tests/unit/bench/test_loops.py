"""What benches make of machine code and of measurements, and what they refuse to report."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cpu_sizes_systems, harness, watching
from bench.codegen.loops import innermost
from bench.codegen.sass import main_loop, read_code
from bench.cpu_sizes_growth import fit
from bench.cpu_sizes_systems import SizesProbe
from vllm_dllm.requests.options import STREAM_CANVASES

WAITS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR4], tmem[UR10] ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0040*/                   FADD R2, R2, R3 ;
        /*0050*/                   BRA.U UP0, `(.L_x_0) ;
        /*0060*/                   UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR4], tmem[UR10] ;
        /*0070*/                   UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR4], tmem[UR10] ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*00a0*/              @!P0 BRA `(.L_x_2) ;
        /*00b0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3) ;
"""


NESTED = """
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


def names(code: str, *wanted: str) -> list[list[str]]:
    return [[each.name for each in loop] for loop in innermost(read_code(code), wanted)]


def test_what_jumps_back_into_a_loop_does_not_make_one_of_the_code_behind_it() -> None:
    whole = ["UTCHMMA", "SYNCS", "BRA", "FADD", "BRA", "SYNCS", "BRA", "BRA"]
    assert names(WAITS, "UTCHMMA") == [whole]
    assert names(WAITS, "SYNCS") == [["SYNCS", "BRA"]]
    assert [each.name for each in main_loop(read_code(WAITS))] == whole


def test_a_loop_around_another_one_is_not_the_main_loop() -> None:
    """Of a pipelined loop, passes before and after it may stand in the loop around it."""
    assert [each.name for each in main_loop(read_code(NESTED))] == ["HMMA", "BRA"]


def test_code_without_a_loop_is_taken_whole() -> None:
    code = "/*0000*/ IADD3 R1, R1, 1 ;\n/*0010*/ EXIT ;\n"
    assert names(code, "IADD3") == []
    assert [each.name for each in main_loop(read_code(code))] == ["IADD3", "EXIT"]


PLAIN, PLUGIN = (SimpleNamespace(port=port) for port in (1, 2))


def stream(text: str, num_canvases: int) -> bytes:
    chunks: list[dict[str, Any]] = [{"choices": [{"text": letter}]} for letter in text]
    chunks[1:1] = [{"choices": [], "canvas": {}}] * num_canvases
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*events, "data: [DONE]\n\n"]).encode()


@pytest.mark.parametrize(
    ("watched", "unwatched", "is_refused"),
    [
        (("ab", 3), ("ab", 0), False),
        (("ac", 3), ("ab", 0), True),
        (("ab", 0), ("ab", 0), True),
        (("ab", 3), ("ab", 3), True),
    ],
    ids=["same", "another answer", "no canvases", "canvases for nobody"],
)
def test_refuses(
    monkeypatch: pytest.MonkeyPatch,
    watched: tuple[str, int],
    unwatched: tuple[str, int],
    is_refused: bool,
) -> None:
    def ask(server: Any, model: Path, asked: dict[str, Any]) -> bytes:
        watches = STREAM_CANVASES in asked["vllm_xargs"]
        return stream(*(watched if watches and server is PLUGIN else unwatched))

    monkeypatch.setattr(watching, "ask", ask)
    servers: Any = [PLAIN, PLUGIN]
    if is_refused:
        with pytest.raises(harness.Refused):
            watching.check(servers, Path("model"))
    else:
        watching.check(servers, Path("model"))


CANVAS = 256


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(cpu_sizes_systems.time, "perf_counter", lambda: now.s)
    return now


def test_steps_of_full_canvases_are_timed(clock: SimpleNamespace) -> None:
    """The first of two requests came a step before the other."""

    def execute(scheduled: Any) -> None:
        clock.s += scheduled.ms / 1000

    def sample() -> None:
        clock.s += 0.001

    probe = SizesProbe()
    probe.execute_model, probe.sample_tokens = execute, sample
    assert probe.num_forwards() == 0
    for rows, ms in ((63 + CANVAS, 10), (63 + 2 * CANVAS, 20), (2 * CANVAS, 30), (CANVAS, 15)):
        probe.execute_model(SimpleNamespace(total_num_scheduled_tokens=rows, ms=ms))
        probe.sample_tokens()
        clock.s += 0.002  # until the next step
    assert probe.num_forwards() == 4
    assert probe.canvas_steps_ms(0, CANVAS, count=2) == [pytest.approx(33)]
    assert probe.canvas_steps_ms(3, CANVAS, count=2) == [pytest.approx(2 * 16)]


def test_an_exponent_is_fitted_to_the_larger_half() -> None:
    points = {size: 5.0 if size < 16 else 0.25 * size**1.5 for size in (0, 1, 2, 4, 16, 32, 64)}
    found = fit(points)
    assert found == pytest.approx({"exponent": 1.5, "factor_ms": 0.25, "from": 16, "to": 64})
