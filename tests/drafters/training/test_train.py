"""Training a drafter: it learns, resumes exactly, writes all or nothing, and refuses clearly."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_dllm import cli
from vllm_dllm.drafters.buffer import BlockBuffer
from vllm_dllm.drafters.training import train
from vllm_dllm.drafters.training.blocks import KnownSequence
from vllm_dllm.drafters.training.reference import DrafterError, load_drafter
from vllm_dllm.drafters.training.tiny import MASK_TOKEN, make_tiny_drafter, make_tiny_target

OPTIONS = train.Options(
    block_size=8, num_layers=1, mask_token=MASK_TOKEN, steps=8, max_tokens=12, tokens_per_batch=512
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["".join(rng.choices("abcdefgh", k=rng.randint(3, 9))) for _ in range(40)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture(autouse=True)
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "LOG_EVERY", 2)
    monkeypatch.setattr(train, "SAVE_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def trained(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "dflash"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_EVERY", 2)
        train.train(target, out, OPTIONS, prompts=prompts)
    return out


def test_writes_a_drafter_with_its_log_and_pictures(trained: Path) -> None:
    names = {"config.json", "model.safetensors", "training_log.json", "loss.png", "tau.png"}
    assert {path.name for path in trained.iterdir()} == names
    assert not trained.with_name("dflash.partial").exists()
    drafter = load_drafter(trained)
    assert drafter.config.block_size == 8
    assert drafter.config.dflash_config == {"mask_token_id": 497, "target_layer_ids": [2]}
    log = json.loads((trained / "training_log.json").read_text())
    assert [entry["step"] for entry in log] == [2, 4, 6, 8]
    assert log[-1]["loss"] < log[0]["loss"]
    assert all(1 <= entry["tau_held_out"] <= 8 for entry in log)


@pytest.mark.parametrize("stopped_at", [3, 6], ids=["between two logs", "just after a log"])
def test_killed_and_resumed_gives_the_same_weights(
    target: Path,
    prompts: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped_at: int,
) -> None:
    out = tmp_path / "dflash"
    draw_anchors = train.draw_anchors

    def stop(rows: Any, options: train.Options, step: int) -> Any:
        if step == stopped_at:
            raise KeyboardInterrupt
        return draw_anchors(rows, options, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "draw_anchors", stop)
        train.train(target, out, OPTIONS, prompts=prompts)
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(train, "complete", None)  # the answers are there already
        train.train(target, out, OPTIONS, prompts=prompts)
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (trained / weights).read_bytes()
    logs = [json.loads((path / "training_log.json").read_text()) for path in (out, trained)]
    for entry in (*logs[0], *logs[1]):
        del entry["minutes"]
    assert logs[0] == logs[1]


def test_another_run_is_not_resumed(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dflash"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "draw_anchors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train.train(target, out, OPTIONS, prompts=prompts)
    other = train.Options(**{**vars(OPTIONS), "seed": 5})
    with pytest.raises(DrafterError, match=r"dflash\.partial is left from a run with another"):
        train.train(target, out, other, prompts=prompts)


def test_goes_on_from_a_buffer(target: Path, trained: Path, tmp_path: Path) -> None:
    buffer = BlockBuffer(tmp_path / "buffer", max_bytes=100_000)
    rng = random.Random(1)
    for _ in range(30):
        buffer.add([rng.randrange(7, 490) for _ in range(14)], start=9, accepted=3)
    buffer.close()
    out = tmp_path / "dflash"
    train.train(target, out, OPTIONS, from_buffer=tmp_path / "buffer", init_from=trained)
    drafter, before = load_drafter(out), load_drafter(trained)
    assert drafter.config.dflash_config == before.config.dflash_config
    assert not drafter.fc.weight.equal(before.fc.weight)
    log = json.loads((out / "training_log.json").read_text())
    assert log[-1]["loss"] < log[0]["loss"]


def test_anchors_lie_where_the_next_token_is_known() -> None:
    rows = [KnownSequence(list(range(20)), 6), KnownSequence(list(range(9)), 7)]
    options = train.Options(block_size=16, steps=1, blocks_per_sequence=4)
    seen: set[int] = set()
    widths_seen: set[int] = set()
    for step in range(200):
        anchors, widths = train.draw_anchors(rows, options, step)
        assert anchors[1] == [7, -1, -1, -1]
        assert len(set(anchors[0])) == 4
        seen |= set(anchors[0])
        widths_seen |= set(widths[0])
    assert seen == set(range(6, 19))
    assert widths_seen == set(range(2, 17))


def test_every_epoch_holds_every_sequence() -> None:
    sequences = [KnownSequence(list(range(n)), 2) for n in range(5, 45)]
    options = train.Options(tokens_per_batch=400, steps=1)
    feed = train.batches(sequences, options, num_blocks=4)
    for _ in range(3):
        epoch: list[int] = []
        while len(epoch) < len(sequences):
            rows = next(feed)
            longest = max(len(row.tokens) for row in rows)
            assert len(rows) * (longest + 4 * 16) <= 400 or len(rows) == 1
            epoch += [len(row.tokens) for row in rows]
        assert sorted(epoch) == list(range(5, 45))


@pytest.mark.parametrize(
    ("num_target_layers", "count", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (8, 3, (1, 3, 5)), (4, 1, (2,))],
    ids=["z-lab/Qwen3-4B-DFlash-b16", "the shipped target", "one"],
)
def test_layers_are_spread_as_in_published_drafters(
    num_target_layers: int, count: int, expected: tuple[int, ...]
) -> None:
    assert train.spread_layers(num_target_layers, count) == expected


CASES: dict[str, tuple[list[str], str]] = {
    "no sequences": ([], "expected either --prompts FILE.jsonl or --from-buffer DIR"),
    "both": (
        ["--prompts", "{prompts}", "--from-buffer", "{here}"],
        "expected either --prompts FILE.jsonl or --from-buffer DIR",
    ),
    "server alone": (
        ["--server", "http://x", "--from-buffer", "{here}"],
        "--server answers prompts: expected --prompts",
    ),
    "buffer alone": (["--from-buffer", "{here}"], "name it with --init-from DRAFTER"),
    "layer out of range": (
        ["--prompts", "{prompts}", "--target-layers", "1,4"],
        "the drafter reads target layers [1, 4], the target has layers 0 to 3",
    ),
    "unknown mask": (
        ["--prompts", "{prompts}", "--mask-token", "<mask>"],
        "the target's vocabulary has no token '<mask>' for the mask",
    ),
    "block too small": (
        ["--prompts", "{prompts}", "--block-size", "1"],
        "expected a block of at least 2 slots",
    ),
    "no target": (
        ["--prompts", "{prompts}", "--target", "{here}"],
        "holds no model: expected a folder with config.json",
    ),
    "drafter of another target": (
        ["--prompts", "{prompts}", "--init-from", "{other}"],
        "the drafter is for a target of 6 layers, the target has 4",
    ),
    "answers too long": (
        ["--prompts", "{prompts}", "--max-tokens", "1023"],
        "tokens, expected 1 to 1",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_line(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    other = tmp_path / "other"
    make_tiny_target(other / "target", num_layers=6)
    make_tiny_drafter(other / "dflash", other / "target")
    places = {"here": tmp_path, "prompts": prompts, "other": other / "dflash"}
    given = [argument.format(**places) for argument in arguments]
    defaults = ["--target", str(target), "--mask-token", MASK_TOKEN, "--steps", "1"]
    out = tmp_path / "dflash"
    capsys.readouterr()  # what transformers says while it saves
    assert cli.main(["drafter", "train", *defaults, "-o", str(out), *given]) == 1
    error = capsys.readouterr().err
    assert error.startswith("vllm-dllm drafter train: ")
    assert error.count("\n") == 1
    assert message in error
    assert not out.exists()


@pytest.mark.parametrize("length", [[], ["--steps", "1", "--minutes", "1"]], ids=["none", "both"])
def test_needs_one_length(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    length: list[str],
) -> None:
    given = ["--target", str(target), "--prompts", str(prompts), "-o", str(tmp_path / "dflash")]
    assert cli.main(["drafter", "train", *given, *length]) == 1
    assert "expected either --minutes or --steps" in capsys.readouterr().err


def test_does_not_overwrite(
    target: Path, prompts: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "config.json").read_bytes()
    given = ["--target", str(target), "--prompts", str(prompts), "-o", str(trained)]
    assert cli.main(["drafter", "train", *given, "--steps", "1"]) == 1
    assert "exists already: remove it or name another folder" in capsys.readouterr().err
    assert (trained / "config.json").read_bytes() == before
