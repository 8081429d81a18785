"""Which version of attention runs: what the shipped times say, and how times decide."""

from typing import Any

import pytest

from vllm_dllm.attention.choice import Choice, LayerKind, Times

SLIDING, FULL = LayerKind(256, 16, has_window=True), LayerKind(512, 16, has_window=False)
CANVAS = 256
LONG = 262_144


def hopper() -> Times:
    times = Times.shipped((9, 0))
    assert times is not None and times.gpu == "NVIDIA H200"
    return times


def chosen(layer: LayerKind, longest: int = LONG, times: Times | None = None) -> Choice:
    choice = (times or hopper()).choose(layer, longest)
    assert choice is not None
    return choice


def test_the_26b_model_on_hopper() -> None:
    for layer in (FULL, SLIDING, SLIDING._replace(num_heads=8)):
        assert chosen(layer) == Choice(((0, "fa4"),)), str(chosen(layer))
    assert str(chosen(FULL)) == "FlashAttention-4"


def test_a_rank_with_fewer_heads_has_less_work_a_row() -> None:
    own = times((256, 0, 1, 2), (1024, 0, 2, 1))
    assert chosen(SLIDING, times=own).steps == ((0, "triton"), (512, "fa4"))
    halved = SLIDING._replace(num_heads=8)
    assert chosen(halved, times=own).steps == ((0, "triton"), (1024, "fa4"))


def test_contexts_that_a_server_does_not_allow_say_nothing() -> None:
    own = times((256, 0, 2, 1), (256, 1024, 1, 3))
    assert chosen(SLIDING, 1000, own).version_for(CANVAS) == "fa4"
    assert chosen(SLIDING, 1024, own).version_for(CANVAS) == "triton"


@pytest.mark.parametrize(
    "layer",
    [SLIDING._replace(has_window=False), FULL._replace(has_window=True), LayerKind(128, 32, 0)],
)
def test_other_layers_and_chips_are_unknown(layer: LayerKind) -> None:
    assert hopper().choose(layer, LONG) is None
    for capability in ((8, 0), (10, 0), (12, 0)):
        assert Times.shipped(capability) is None


def times(*cells: tuple[int, int, float, float]) -> Times:
    measured = [dict(rows=r, context=c, triton=t, fa4=f) for r, c, t, f in cells]
    return Times("a GPU", [{"head_size": 256, "has_window": True, "num_heads": 16, "ms": measured}])


TABLES: dict[str, tuple[list[tuple[int, int, float, float]], tuple[tuple[int, str], ...]]] = {
    "the faster": ([(256, 0, 2, 1)], ((0, "fa4"),)),
    "equals": ([(256, 0, 1.01, 1)], ((0, "triton"),)),
    "no longer equals": ([(256, 0, 1.03, 1)], ((0, "fa4"),)),
    "of two that take turns, the one that loses less": (
        [(256, 0, 1, 1.3), (256, 1024, 1.2, 1)],
        ((0, "triton"),),
    ),
    "from half of what was measured": (
        [(256, 0, 1, 2), (1024, 0, 2, 1), (4096, 0, 2, 1), (8192, 0, 1, 2)],
        ((0, "triton"), (512, "fa4"), (4096, "triton")),
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_times_decide(table: str) -> None:
    cells, expected = TABLES[table]
    assert chosen(SLIDING, times=times(*cells)).steps == expected


def test_what_a_server_measures_is_read_the_same_way() -> None:
    layer: dict[str, Any] = {"head_size": 512, "has_window": False, "num_heads": 16}
    layer["ms"] = [{"rows": 256, "context": 0, "triton": 1.0, "fa4": 2.0}]
    own = Times("another", [layer])
    assert own.gpu == "another" and own.choose(FULL, LONG) == Choice(((0, "triton"),))
    assert own.choose(SLIDING, LONG) is None
    layer["ms"] = [{"rows": 256, "context": 0, "fa4": 2.0}, {"rows": 512, "context": 0, "fa4": 2.0}]
    assert Times("x", [layer]).choose(FULL, LONG) == Choice(((0, "fa4"),))
