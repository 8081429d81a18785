"""Prompts and the target's answers to them, from transformers and from a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from checkpoints.recipes.tokenizer import EOS_ID
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter import sequences
from vllm_dllm.tools.drafter.reference import Target
from vllm_dllm.tools.drafter.sequences import (
    KnownSequence,
    collect_answers,
    complete,
    make_server_completer,
    read_prompts,
)
from vllm_dllm.tools.inputs import read_tokenizer

MAX_TOKENS = 6


def test_reads_messages_and_texts(target_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": "Sort: b a"}]}, {"prompt": "Sort: b a"}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    with_template, plain = read_prompts(path, target_folder, room=100)
    start = "".join(map(str, with_template)).index("".join(map(str, plain)))
    assert start > 0, "the text is inside of its turn"
    assert len(with_template) > len(plain)


def test_lines_are_what_json_lines_says(target_folder: Path, tmp_path: Path) -> None:
    """In UTF-8, whatever the locale, perhaps with a byte-order mark, and apart at line feeds alone.
    Tables that are saved as JSON have a null where a row lacks a column."""
    path = tmp_path / "prompts.jsonl"
    texts = ["naïve", "one\u2028line", "one\x85line"]
    rows = [{"prompt": text, "messages": None} for text in texts]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    tokenizer = read_tokenizer(target_folder)
    assert read_prompts(path, target_folder, room=100) == [tokenizer.encode(t) for t in texts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the prompts"),
        ("", "holds no prompts: expected one JSON object per line"),
        ("Sort: b a\n", "line 1 is not JSON"),
        ('{"text": "Sort: b a"}\n', r'line 1: expected \{"messages": \[...\]\} or \{"prompt"'),
        ('{"prompt": ["Sort"]}\n', "line 1 cannot be encoded"),
        ('{"prompt": "Sort: ' + "b " * 60 + '"}\n', "tokens, expected 1 to 50"),
    ],
    ids=["no file", "empty", "not JSON", "other keys", "not a text", "too long"],
)
def test_refuses_unusable_prompts(
    target_folder: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_prompts(path, target_folder, room=50)


@torch.no_grad()
def test_answers_are_greedy_and_in_order(
    target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "BATCH_SIZE", 2)
    for prompt, answer in zip(prompts, complete(target, prompts, MAX_TOKENS), strict=True):
        tokens = list(prompt)
        for token in answer:
            assert token == int(target.model(torch.tensor([tokens])).logits[0, -1].argmax())
            tokens.append(token)
        assert len(answer) == MAX_TOKENS or answer[-1] == EOS_ID


def test_answers_end_with_eos(
    target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token that some answer holds in its middle as EOS."""
    answers = complete(target, prompts, MAX_TOKENS)
    stop = answers[0][2]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [EOS_ID, stop])
    expected = [a[: a.index(stop) + 1] if stop in a else a for a in answers]
    assert complete(target, prompts, MAX_TOKENS) == expected
    assert expected != answers


def test_goes_on_behind_the_last_whole_line(tmp_path: Path, prompts: list[list[int]]) -> None:
    path = tmp_path / "completions.jsonl"
    asked: list[list[int]] = []

    def answer(batch: Any) -> list[list[int]]:
        asked.extend(batch)
        return [[prompt[0], EOS_ID] for prompt in batch]

    expected = [KnownSequence([*p, p[0], EOS_ID], len(p)) for p in prompts]
    assert collect_answers(prompts, answer, path) == expected
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    asked.clear()
    assert collect_answers(prompts, answer, path) == expected
    assert asked == prompts[3:]
    assert path.read_bytes() == b"".join(lines)


def test_leaves_out_answers_without_an_anchor(tmp_path: Path, prompts: list[list[int]]) -> None:
    path = tmp_path / "completions.jsonl"
    with pytest.raises(InputError, match="prompts with two tokens or more: give"):
        collect_answers(prompts, lambda batch: [[EOS_ID] for _ in batch], path)


@pytest.fixture
def server(
    served: tuple[str, dict[str, Callable[[bytes], tuple[int, str]]]],
) -> tuple[str, dict[str, Any]]:
    """URL of a stand-in for vLLM's server, and what the test wants in its answers."""
    url, answers = served
    extra: dict[str, Any] = {}

    def complete(body: bytes) -> tuple[int, str]:
        request = json.loads(body)
        assert request["model"] == "tiny"
        assert request["temperature"] == 0.0
        assert request["max_tokens"] == MAX_TOKENS
        assert request["return_token_ids"] is True
        answer = [request["prompt"][0], EOS_ID]
        choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": answer}
        completion = {"id": "1", "object": "text_completion", "choices": [choice | extra]}
        return 200, json.dumps(completion)

    models = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
    answers |= {"/v1/models": lambda _: (200, json.dumps(models)), "/v1/completions": complete}
    return url, extra


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_asks_a_server_for_token_ids(
    server: tuple[str, dict[str, Any]], prompts: list[list[int]], suffix: str
) -> None:
    answers = make_server_completer(server[0] + suffix, MAX_TOKENS, 512)(prompts)
    assert list(answers) == [[prompt[0], EOS_ID] for prompt in prompts]


@pytest.mark.parametrize(
    ("token_ids", "said"),
    [
        (None, r"sent no token ids: expected vLLM 0\.32"),
        ([700], "tiny wrote token 700, the target's vocabulary has 512"),
    ],
)
def test_refuses_what_a_server_says(
    server: tuple[str, dict[str, Any]],
    prompts: list[list[int]],
    token_ids: list[int] | None,
    said: str,
) -> None:
    server[1]["token_ids"] = token_ids
    with pytest.raises(InputError, match=said):
        list(make_server_completer(server[0], MAX_TOKENS, 512)(prompts))


def test_what_a_server_answered_before_it_refused_is_kept(
    server: tuple[str, dict[str, Any]], prompts: list[list[int]], tmp_path: Path
) -> None:
    completer, path = make_server_completer(server[0], MAX_TOKENS, 90), tmp_path / "answers.jsonl"
    with pytest.raises(InputError, match="wrote token 93"):
        collect_answers([[7], [8], [93]], completer, path)
    assert len(path.read_text().splitlines()) == 2


def test_a_server_with_an_api_key(
    served: tuple[str, dict[str, Callable[[bytes], tuple[int, str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, answers = served
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    keys: list[str] = []
    monkeypatch.setattr(
        openai.OpenAI, "_prepare_request", lambda _, r: keys.append(r.headers["authorization"])
    )
    answers["/v1/models"] = lambda _: (401, '{"error": "Unauthorized"}')
    with pytest.raises(InputError, match=f"the server at {url} wants its API key in VLLM_API_KEY"):
        make_server_completer(url, MAX_TOKENS, 512)
    assert keys == ["Bearer secret"]


def test_says_that_no_server_answers() -> None:
    with pytest.raises(InputError, match="no vLLM server answers at http://127"):
        make_server_completer("http://127.0.0.1:9", MAX_TOKENS, 512)
