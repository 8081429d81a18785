"""How a kernel timeline is cut into steps."""

import gzip
import json
from pathlib import Path

import pytest

from bench import timeline

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
