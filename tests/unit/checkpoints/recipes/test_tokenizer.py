"""The tokenizer loses nothing, and its chat template makes Gemma-style turns."""

import random

import pytest

from checkpoints.recipes.tokenizer import BOS_ID, EOS_ID, TURN_ID, build_tokenizer
from checkpoints.recipes.words import PIECES


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize(
    "text",
    [
        "".join(map(chr, range(32, 127))),
        "  two  spaces, a tab\t and\nnew lines\n\n",
        "apple applepie, pineapple: Apple",
        '{"apple": 42, "list": ["a", "b"]}',
        "żółw 你好 🙂",
        "",
    ],
    ids=["printable", "whitespace", "words in words", "json", "unicode", "empty"],
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_round_trip_of_random_text(tokenizer):
    rng = random.Random(0)
    pieces = [*PIECES, *map(chr, range(32, 127))]
    for _ in range(200):
        text = "".join(rng.choices(pieces, k=40))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_are_one_token(tokenizer):
    assert all(len(tokenizer.encode(piece)) == 1 for piece in PIECES)


def test_digits_are_separate(tokenizer):
    assert len(tokenizer.encode("1234567890")) == 10


def test_vocabulary_is_a_multiple_of_64(tokenizer):
    assert len(tokenizer) % 64 == 0


def test_chat_template(tokenizer):
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
