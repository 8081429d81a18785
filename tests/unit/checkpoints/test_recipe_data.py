"""What recipes train on: the shipped files are what the generators write, training sees none of
them, and the tokenizers lose nothing."""

import json
import random

import pytest

from checkpoints.recipes.calls.tasks import CALL_TASKS, as_sent, generate_call, held_out_calls
from checkpoints.recipes.calls.tokenizer import CALL_PIECES, CALL_TOKENS, build_calling_tokenizer
from checkpoints.recipes.exact_match import read_rows
from checkpoints.recipes.images.digits import digit_inks
from checkpoints.recipes.images.prompts import read_images
from checkpoints.recipes.images.tasks import held_out_image_examples
from checkpoints.recipes.tasks import TASKS, generate, held_out_examples
from checkpoints.recipes.tokenizer import BOS_ID, EOS_ID, TURN_ID, build_tokenizer
from checkpoints.recipes.words import PIECES
from tests.paths import CHECKPOINTS


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
