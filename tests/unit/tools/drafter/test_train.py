"""Training a drafter: it learns, resumes exactly, writes all or nothing, and refuses clearly. What
a block sees when many share a forward."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.recipes.drafter.tiny import MASK_TOKEN, make_tiny_drafter, make_tiny_target
from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests import tolerances
from tests.unit.config.test_files import room_for
from vllm_dllm import cli
from vllm_dllm.drafters.buffer import BlockBuffer
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter import fit, train
from vllm_dllm.tools.drafter.blocks import Blocks, block_logits, make_blocks
from vllm_dllm.tools.drafter.fit import TrainingOptions
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target, load_drafter, load_target
from vllm_dllm.tools.drafter.sequences import KnownSequence, complete, read_prompts
from vllm_dllm.tools.inputs import read_config

pytestmark = pytest.mark.numerics

OPTIONS: dict[str, Any] = dict(
    block_size=8, num_layers=1, mask_token=MASK_TOKEN, steps=8, max_tokens=12, tokens_per_batch=512
)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["".join(rng.choices("abcdefgh", k=rng.randint(3, 9))) for _ in range(40)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module", autouse=True)
def short_log() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "LOG_EVERY", 2)
        patch.setattr(fit, "SAVE_EVERY_S", 0.0)
        yield


@pytest.fixture(scope="module")
def trained(
    target_folder: Path, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("trained") / "dflash"
    train.train(target_folder, out, **OPTIONS, prompts=prompt_file)
    return out


def read_log(path: Path) -> list[dict[str, Any]]:
    return json.loads((path / "training_log.json").read_text())


@contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """The training in the block is stopped by Ctrl-C as it reaches the step."""

    draw = fit.draw_batch

    def stop(sequences: Any, options: TrainingOptions, now: int) -> Any:
        if now == step:
            raise KeyboardInterrupt
        return draw(sequences, options, now)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fit, "draw_batch", stop)
        yield


def longest_answered(target_folder: Path, prompt_file: Path) -> int:
    """Tokens of a prompt and its answer."""
    room = read_config(target_folder).max_position_embeddings - OPTIONS["max_tokens"]
    questions = read_prompts(prompt_file, target_folder, room)
    answers = complete(load_target(target_folder, "cpu"), questions, OPTIONS["max_tokens"])
    return max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))


def test_writes_a_drafter_with_its_log_and_pictures(
    trained: Path, target_folder: Path, prompt_file: Path
) -> None:
    names = {"config.json", "model.safetensors", "training_log.json", "training.png"}
    assert {path.name for path in trained.iterdir()} == names
    assert not trained.with_name("dflash.partial").exists()
    drafter = load_drafter(trained)
    assert drafter.config.block_size == 8
    assert drafter.config.dflash_config == {
        "mask_token_id": 497,
        "target_layer_ids": [2],
        "trained_context": longest_answered(target_folder, prompt_file),
    }
    log = read_log(trained)
    assert [entry["step"] for entry in log] == [2, 4, 6, 8]
    assert log[-1]["loss"] < log[0]["loss"]
    assert all(1 <= entry["tau_held_out"] <= 8 for entry in log)


def test_anchors_lie_where_the_next_token_is_known() -> None:
    short, long = KnownSequence(list(range(9)), 7), KnownSequence(list(range(20)), 6)
    options = TrainingOptions(block_size=16, steps=1, blocks_per_sequence=4, tokens_per_batch=200)
    anchors_seen: set[int] = set()
    widths_seen: set[int] = set()
    for step in range(300):
        rows, anchors, widths = fit.draw_batch([short, long], options, step)
        assert rows in ([short, long], [long])
        assert short not in rows or anchors[0] == [7, -1, -1, -1]
        assert len(set(anchors[-1])) == 4
        anchors_seen |= set(anchors[-1])
        widths_seen |= {width for row in widths for width in row}
    assert anchors_seen == set(range(6, 19))
    assert widths_seen == set(range(2, 17))
    options = TrainingOptions(steps=1, blocks_per_sequence=4, tokens_per_batch=100)
    assert {len(fit.draw_batch([short, long], options, step)[0]) for step in range(20)} == {1}


@pytest.mark.parametrize("step", [3, 6], ids=["between two logs", "just after a log"])
def test_killed_and_resumed_gives_the_same_weights(
    target_folder: Path,
    prompt_file: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    out = tmp_path / "dflash"
    with stopped_at(step):
        train.train(target_folder, out, **OPTIONS, prompts=prompt_file)
    assert not out.exists()
    monkeypatch.setattr(train, "complete", None)  # the answers are there already
    train.train(target_folder, out, **OPTIONS, prompts=prompt_file)
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (trained / weights).read_bytes()
    logs = [read_log(path) for path in (out, trained)]
    for entry in (*logs[0], *logs[1]):
        del entry["minutes"]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("file", ["state.tmp", "model.safetensors.tmp"])
def test_a_full_disk(
    target_folder: Path,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    """While the state is saved, or at the end."""
    if file != "state.tmp":
        monkeypatch.setattr(fit, "SAVE_EVERY_S", math.inf)
    out = tmp_path / "dflash"
    with room_for(50_000), pytest.raises(OSError, match=rf"dflash\.partial/{file}"):
        train.train(target_folder, out, **OPTIONS, prompts=prompt_file)


def test_another_run_is_not_resumed(target_folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "dflash"
    with stopped_at(0):
        train.train(target_folder, out, **OPTIONS, prompts=prompt_file)
    with pytest.raises(InputError, match=r"dflash\.partial is left from a run with another"):
        train.train(target_folder, out, **OPTIONS | {"seed": 5}, prompts=prompt_file)


def test_goes_on_from_a_buffer(
    target_folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = BlockBuffer(tmp_path / "buffer", max_bytes=100_000)
    rng = random.Random(1)
    for _ in range(30):
        buffer.add_block([rng.randrange(7, 490) for _ in range(14)], anchor=9, accepted=3)
    buffer.close()
    out = tmp_path / "dflash"
    train.train(target_folder, out, **OPTIONS, from_buffer=tmp_path / "buffer", init_from=trained)
    drafter, before = load_drafter(out), load_drafter(trained)
    assert drafter.config.dflash_config == before.config.dflash_config
    assert not drafter.fc.weight.equal(before.fc.weight)
    log = read_log(out)
    assert log[-1]["loss"] < log[0]["loss"]
    assert re.search(
        r"Step 8: loss \d\.\d+, \d\.\d\d tokens per verification on held-out prompts, "
        r"0\.0 minutes left\n",
        capsys.readouterr().err,
    )


def test_what_a_published_drafter_was_trained_on_stays_unknown(
    target_folder: Path, prompt_file: Path, trained: Path, tmp_path: Path
) -> None:
    published = shutil.copytree(trained, tmp_path / "published")
    config = json.loads((published / "config.json").read_text())
    del config["dflash_config"]["trained_context"]
    (published / "config.json").write_text(json.dumps(config))
    out = tmp_path / "dflash"
    train.train(
        target_folder, out, **OPTIONS | {"steps": 1}, prompts=prompt_file, init_from=published
    )
    assert "trained_context" not in load_drafter(out).config.dflash_config


@pytest.mark.parametrize(
    ("num_target_layers", "count", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (8, 3, (1, 3, 5)), (4, 1, (2,))],
    ids=["z-lab/Qwen3-4B-DFlash-b16", "the shipped target", "one"],
)
def test_layers_are_spread_as_in_published_drafters(
    num_target_layers: int, count: int, expected: tuple[int, ...]
) -> None:
    assert train.spread_layers(num_target_layers, count) == expected


@pytest.fixture
def refusal(
    target_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command, which has to refuse; returns what it says, which has to be one line."""

    def run(options: str, target: Path = target_folder) -> str:
        places, out = {"here": tmp_path, "prompts": prompt_file}, str(tmp_path / "dflash")
        given = [word.format(**places) for word in options.split()]
        fixed = ["--target", str(target), "--mask-token", MASK_TOKEN, "-o", out]
        capsys.readouterr()  # what transformers says while it saves
        assert cli.main(["drafter", "train", *fixed, *given]) == 1
        error = capsys.readouterr().err
        assert error.startswith("vllm-dllm drafter train: ")
        assert error.count("\n") == 1
        return error

    return run


# TrainingOptions, and what is said of them.
CASES = {
    "no sequences": ("--steps 1", "expected either --prompts FILE.jsonl or --from-buffer DIR"),
    "both": (
        "--steps 1 --prompts {prompts} --from-buffer {here}",
        "expected either --prompts FILE.jsonl or --from-buffer DIR",
    ),
    "server alone": (
        "--steps 1 --server http://x --from-buffer {here}",
        "--server answers prompts: expected --prompts",
    ),
    "buffer alone": ("--steps 1 --from-buffer {here}", "name it with --init-from DRAFTER"),
    "no length": ("--prompts {prompts}", "expected either --minutes or --steps"),
    "two lengths": (
        "--steps 1 --minutes 1 --prompts {prompts}",
        "expected either --minutes or --steps",
    ),
    "layer out of range": (
        "--steps 1 --prompts {prompts} --target-layers 1,4",
        "layer ids [4] of the drafter, layers 0 to 3 in the target",
    ),
    "unknown mask": (
        "--steps 1 --prompts {prompts} --mask-token <mask>",
        "the target's vocabulary has no token '<mask>' for the mask",
    ),
    "block too small": (
        "--steps 1 --prompts {prompts} --block-size 1",
        "--block-size must be from 2, an anchor and a mask, to the 1024 tokens",
    ),
    "block beyond the context": (
        "--steps 1 --prompts {prompts} --block-size 100000000",
        "of the target's context, got 100000000",
    ),
    "no steps": ("--steps 0 --prompts {prompts}", "--steps must be at least 1, got 0"),
    "no layers": ("--steps 1 --prompts {prompts} --layers 0", "--layers must be at least 1, got 0"),
    "negative minutes": (
        "--minutes -1 --prompts {prompts}",
        "--minutes must be a number greater than 0, got -1.0",
    ),
    "minutes that are no number": ("--minutes nan --prompts {prompts}", "greater than 0, got nan"),
    "no answers": (
        "--steps 1 --prompts {prompts} --max-tokens 0",
        "--max-tokens must be from 1 to 1023, since the target's context of 1024 tokens also",
    ),
    "answers beyond the context": (
        "--steps 1 --prompts {prompts} --max-tokens 1024",
        "also holds the prompt, got 1024",
    ),
    "unknown device": (
        "--steps 1 --prompts {prompts} --max-tokens 9 --device gpu",
        "--device must be cpu or cuda, got gpu",
    ),
}


@pytest.mark.parametrize(("options", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_line(
    refusal: Callable[..., str], tmp_path: Path, options: str, message: str
) -> None:
    assert message in refusal(options)
    assert not (tmp_path / "dflash").exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "has a weight file that is not whole"),
        ("tokenizer.json", "transformers cannot read the tokenizer in"),
    ],
)
def test_a_target_that_is_cut_short(
    refusal: Callable[..., str], target_folder: Path, tmp_path: Path, file: str, message: str
) -> None:
    target = Path(shutil.copytree(target_folder, tmp_path / "damaged"))
    (target / file).write_bytes((target / file).read_bytes()[:1000])
    error = refusal("--steps 1 --prompts {prompts} --max-tokens 9", target)
    assert f"{target} " in error and message in error
    assert not (tmp_path / "dflash.partial").exists()


def test_drafter_of_another_target(refusal: Callable[..., str], tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "other", num_layers=6)
    make_tiny_drafter(tmp_path / "its", other)
    error = refusal("--steps 1 --prompts {prompts} --init-from {here}/its")
    assert f"the drafter {tmp_path}/its does not fit the target" in error
    assert "target layers: 6 in the drafter, 4 in the target" in error


def test_target_that_is_not_autoregressive(refusal: Callable[..., str], tmp_path: Path) -> None:
    target = make_tiny_checkpoint(tmp_path / "canvases")
    error = refusal("--steps 1 --prompts {prompts}", target)
    assert f"{target} cannot be a target: expected an autoregressive language model" in error
    assert not (tmp_path / "dflash.partial").exists()


LENGTHS = (20, 13)
ANCHORS = ((5, 11, 18), (3, 9, -1))  # unsorted ones occur too; -1: no block
WIDTHS = ((8, 3, 8), (8, 8, 8))
W = 8
MASK = 497
# Target and drafter have up to 4 layers of 64; states and logits are at most a few units large.
LOGITS = dict(rtol=0.0, atol=tolerances.model(layers=4, width=64, logits=2.0))


@pytest.fixture(scope="module")
def drafter(drafter_folder: Path) -> DFlashDrafter:
    return load_drafter(drafter_folder)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, 490, (2, max(LENGTHS)), generator=generator)
    tokens[1, LENGTHS[1] :] = 0
    return tokens


@pytest.fixture(scope="module")
def blocks(tokens: Tensor) -> Blocks:
    lengths, anchors, widths = map(torch.tensor, (LENGTHS, ANCHORS, WIDTHS))
    return make_blocks(tokens, lengths, anchors, widths, W, MASK)


def test_wanted_are_the_tokens_behind_the_anchor(tokens: Tensor, blocks: Blocks) -> None:
    wanted = blocks.wanted.view(2, 3, W)
    assert wanted[0, 0].tolist() == [-1, *tokens[0, 6:13].tolist()]
    assert wanted[0, 1].tolist() == [-1, *tokens[0, 12:14].tolist(), *[-1] * 5], "ends at its width"
    assert wanted[0, 2].tolist() == [-1, int(tokens[0, 19]), *[-1] * 6], "ends with the sequence"
    assert wanted[1, 2].tolist() == [-1] * W, "no block"


@torch.no_grad()
def test_a_block_among_others_is_a_block_alone(
    target: Target, drafter: DFlashDrafter, tokens: Tensor, blocks: Blocks
) -> None:
    """Alone means: its anchor and masks at the positions that follow, no mask of attention, and a
    context that ends before the anchor. So it sees neither what comes later nor another block."""
    states, _ = target.states(tokens, drafter.target_layer_ids)
    together = block_logits(drafter, target, states, blocks).view(2, 3, W, -1)
    for row in range(2):
        for n, (anchor, width) in enumerate(zip(ANCHORS[row], WIDTHS[row], strict=True)):
            if anchor < 0:
                continue
            slots = torch.tensor([[int(tokens[row, anchor])] + [MASK] * (width - 1)])
            context = drafter.context_kv(states[row : row + 1, :anchor], torch.arange(anchor)[None])
            positions = anchor + torch.arange(width)[None]
            alone = target.logits(drafter(target.embed(slots), positions, context))
            torch.testing.assert_close(together[row, n, :width], alone[0], **LOGITS)


@torch.no_grad()
def test_states_are_the_outputs_of_the_layers(target: Target, tokens: Tensor) -> None:
    """The last layer's too, which transformers shows only behind the final norm."""
    states, logits = target.states(tokens[:1], [1, 3])
    hidden = target.model(tokens[:1], output_hidden_states=True).hidden_states
    second, last = states.chunk(2, dim=-1)
    torch.testing.assert_close(second, hidden[2], **LOGITS)
    torch.testing.assert_close(target.model.model.norm(last), hidden[4], **LOGITS)
    torch.testing.assert_close(target.logits(hidden[4]), logits, **LOGITS)
    assert (last - hidden[4]).abs().max() > 100 * LOGITS["atol"]
