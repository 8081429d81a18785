"""Each recipe runs, and trains on what it says: the shipped files are what the generators write,
training sees none of them, the tokenizers lose nothing, and the training forward gives
transformers' numbers."""

import functools
import json
import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, Qwen3ForCausalLM

from checkpoints.recipes import match_heads
from checkpoints.recipes.calls.tasks import CALL_TASKS, as_sent, generate_call, held_out_calls
from checkpoints.recipes.calls.tokenizer import CALL_PIECES, CALL_TOKENS, build_calling_tokenizer
from checkpoints.recipes.exact_match import read_rows
from checkpoints.recipes.forward import TrainingForward
from checkpoints.recipes.images.digits import digit_inks
from checkpoints.recipes.images.prompts import read_images
from checkpoints.recipes.images.tasks import held_out_image_examples
from checkpoints.recipes.run_log import earlier_log
from checkpoints.recipes.tasks import TASKS, generate, held_out_examples
from checkpoints.recipes.tiny import make_tiny_checkpoint
from checkpoints.recipes.tokenizer import BOS_ID, EOS_ID, TURN_ID, build_tokenizer
from checkpoints.recipes.words import PIECES
from tests import tolerances
from tests.paths import CHECKPOINTS
from vllm_dllm.tools.drafter.reference import load_drafter

TEXT, TARGET = CHECKPOINTS / "diffusiongemma-tiny", CHECKPOINTS / "qwen3-tiny-target"
Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the program of a module in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(module: str, *arguments: object) -> None:
        monkeypatch.setattr("sys.argv", [module, *map(str, arguments)])
        import_module(f"checkpoints.recipes.{module}").main()

    return run


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.slow
def test_train(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.sh`, and the mean of two stages that the later recipes end with."""
    few = functools.partial(match_heads.matching_rows, num_batches=4)
    monkeypatch.setattr(match_heads, "matching_rows", few)
    short = ("--minutes", 0.005, "--log-every", 1, "--processes", 1, "--no-compile")
    run("train", "--out", "1", *short)
    run("match_heads", "1", "2")
    run("train", "--init-from", "2", "--out", "3", "--lookups", "--keep-heads", *short)
    assert [entry["stage"] for entry in earlier_log(Path("3"))] == [1, 2]
    model = DiffusionGemmaForBlockDiffusion.from_pretrained("3")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained("3").eos_token == "<turn|>"
    run("average", "2", "3", "--share", 0.6, "--out", "mean")
    first, second, mean = map(weights, ("2", "3", "mean"))
    name = "model.decoder.layers.0.self_attn.q_proj.weight"
    assert torch.equal(mean[name], first[name].float().lerp(second[name].float(), 0.6).bfloat16())


@pytest.mark.slow
def test_train_tools(run: Run) -> None:
    short = ("--minutes", 0.005, "--log-every", 1, "--processes", 1, "--no-compile")
    run("train", "--init-from", TEXT, "--out", "1", "--keep-heads", "--calls", "first", *short)
    assert "<|tool_call>" in AutoTokenizer.from_pretrained("1").get_vocab()


@pytest.mark.slow
def test_train_seeing(run: Run) -> None:
    run("images.train_tower", "--init-from", TEXT, "--out", "1", "--state", "1.pt", "--steps", 2)
    short = ("--steps", 2, "--images", 4, "--tokens-per-batch", 1100, "--log-every", 1)
    run("images.train", "--init-from", "1", "--out", "2", "--state", "2.pt", *short)
    state = torch.load("2.pt", weights_only=True)
    assert [entry["step"] for entry in state["entries"]] == [1, 2]
    run("images.train", "--init-from", "1", "--out", "2", "--state", "2.pt", *short)  # goes on
    assert any("vision_tower" in name for name in weights("2"))


@pytest.mark.slow
def test_train_drafter(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("train_target", "--out", "target", "--minutes", 0.005, "--log-every", 1)
    assert Qwen3ForCausalLM.from_pretrained("target").dtype == torch.bfloat16
    capsys.readouterr()
    run("drafter.prompts", "--count", 3)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(row) for row in rows] == [["task", "messages"]] * 3
    drafter = CHECKPOINTS / "qwen3-tiny-dflash"
    assert load_drafter(drafter).config.block_size == 16
    run("drafter.evaluate", TARGET, drafter, CHECKPOINTS / "held_out.jsonl", "--every", 100)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["summary"]["all"]["exact_match"] == 1 and found["summary"]["all"]["tau"] > 4


@pytest.mark.slow
def test_train_masked(run: Run) -> None:
    short = ("--steps", 2, "--tokens", 512, "--log-every", 1)
    run("train_masked", "--init-from", TARGET, "--out", "1", *short)
    assert [entry["step"] for entry in earlier_log(Path("1"))] == [1, 2]
    config = json.loads(Path("1", "config.json").read_text())
    assert config["architectures"] == ["SDARForCausalLM"]
    assert (config["block_size"], config["mask_token_id"]) == (4, 497)


@pytest.mark.slow
def test_exact_match(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("exact_match", TEXT, CHECKPOINTS / "held_out.jsonl", "--every", 100, "--dtype", "float32")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]["all"]["rows"] == 6


def test_held_out_texts() -> None:
    rows = read_rows(CHECKPOINTS / "held_out.jsonl")
    assert [(row["task"], row["messages"], row["answer"]) for row in rows] == [
        (example.task, example.messages(), example.answer) for example in held_out_examples()
    ]
    held_out = {row["messages"][0]["content"] for row in rows}
    assert len(held_out) == len(rows) >= 500
    rng = random.Random(0)
    for task in TASKS:
        for _ in range(300):
            assert generate(rng, task, held_out=False).prompt not in held_out


def test_held_out_pictures() -> None:
    rows = read_rows(CHECKPOINTS / "held_out_images.jsonl")
    for row, example in zip(rows, held_out_image_examples(), strict=True):
        # Not the bytes of the files: another zlib packs them otherwise.
        [image] = read_images(row["messages"])
        assert image.tobytes() == example.picture.image.tobytes()
        assert row["messages"][0]["content"][1]["text"] == example.prompt
        assert row["answer"] == example.answer
    for digit in range(10):
        seen, unseen = (
            {ink.tobytes() for ink in digit_inks(digit, held_out=side)} for side in (False, True)
        )
        assert not seen & unseen and len(unseen) >= 20 and len(seen) >= 100


def test_held_out_calls() -> None:
    rows = read_rows(CHECKPOINTS / "held_out_tools.jsonl")
    assert [(r["task"], r["messages"], r["tools"], r["answer"]) for r in rows] == [
        (example.task, as_sent(example.messages()), example.tools(), example.answer)
        for example in held_out_calls()
    ]
    held_out = {json.dumps([row["messages"], row["tools"]]) for row in rows}
    rng = random.Random(7)
    for task in CALL_TASKS:
        for _ in range(200):
            example = generate_call(rng, task, held_out=False)
            assert json.dumps([as_sent(example.messages()), example.tools()]) not in held_out


@pytest.mark.parametrize("build", [build_tokenizer, build_calling_tokenizer])
def test_tokenizers_lose_nothing(build) -> None:
    tokenizer = build()
    rng = random.Random(0)
    pieces = [*PIECES, *map(chr, range(32, 127)), "  ", "\t", "\n\n", "żółw 你好 🙂"]
    for _ in range(200):
        text = "".join(rng.choices(pieces, k=40))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(len(tokenizer.encode(piece)) == 1 for piece in PIECES)
    assert len(tokenizer.encode("1234567890")) == 10
    assert len(tokenizer) % 64 == 0


def test_chat_template() -> None:
    tokenizer = build_tokenizer()
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": [{"type": "text", "text": "Sort: b a"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><|turn>user\nHello!<turn|>\n<|turn>model\nHi!<turn|>\n"
        "<|turn>user\nSort: b a<turn|>\n<|turn>model\n"
    )
    ids = tokenizer.encode(text)
    assert ids[:2] == [BOS_ID, TURN_ID]
    assert ids.count(EOS_ID) == 3 and tokenizer.eos_token_id == EOS_ID


def test_calls_change_no_other_prompt() -> None:
    before, calling = build_tokenizer(), build_calling_tokenizer()
    assert len(before) == len(calling)
    rng = random.Random(3)
    for task in TASKS:
        for _ in range(50):
            messages = generate(rng, task, held_out=False).messages()
            old, new = (
                t.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
                for t in (before, calling)
            )
            assert old == new
    assert all(len(calling.encode(text)) == 1 for text in [*CALL_TOKENS, *CALL_PIECES])
    special = calling.encode("".join(CALL_TOKENS))
    assert calling.decode(special, skip_special_tokens=True) == ""


VOCAB_SIZE, CANVAS_LENGTH = 512, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), canvas_length=CANVAS_LENGTH)
    return DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.numerics
@pytest.mark.parametrize("lengths", [[1, 1], [20, 20], [31, 30], [100, 33]], ids=str)
@torch.no_grad()
def test_logits_equal_transformers(model, lengths):
    torch.manual_seed(0)
    longest = max(lengths)
    prefix = torch.randint(7, VOCAB_SIZE, (len(lengths), longest))
    is_token = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    canvases = torch.randint(VOCAB_SIZE, (len(lengths), 2, CANVAS_LENGTH))
    previous = 3 * torch.randn(1, 2, CANVAS_LENGTH, VOCAB_SIZE)

    training = TrainingForward(model)
    ours = training.decode(canvases, training.encode(prefix, is_token), previous)

    for row, length in enumerate(lengths):
        for copy in range(2):
            reference = model(
                input_ids=prefix[row : row + 1, longest - length :],
                decoder_input_ids=canvases[row : row + 1, copy],
                # Only the first prefix has self-conditioning in `previous`.
                self_conditioning_logits=previous[:, copy] if row == 0 else None,
            ).logits
            torch.testing.assert_close(ours[row, copy], reference[0], rtol=0, atol=tolerances.LOGIT)
