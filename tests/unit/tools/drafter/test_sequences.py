"""Prompts and the target's answers to them, and the reference drafter against DFlash's formulas
written out one row at a time in float64."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from checkpoints.recipes.tokenizer import EOS_ID
from tests import tolerances
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter import sequences
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target, load_drafter, save_drafter
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


NUM_CONTEXT, NUM_SLOTS = 11, 5
# Rotated by the same fp32 angles; all else is float64.
FP64 = tolerances.within(tolerances.sum_error(1000, torch.float64), size=10.0)


@pytest.fixture(scope="module")
def drafter(drafter_folder: Path) -> DFlashDrafter:
    return load_drafter(drafter_folder).double()


@pytest.fixture
def inputs(drafter: DFlashDrafter) -> tuple[Tensor, Tensor]:
    """States [C, layers · H] and embeddings [W, H]."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(NUM_CONTEXT, drafter.fc.in_features, generator=generator)
    embeddings = torch.randn(NUM_SLOTS, drafter.config.hidden_size, generator=generator)
    return states.double(), embeddings.double()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head x [D]: channel i turns with channel i + D/2."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position * 10_000.0 ** (-i / half)
        a, b = x[i], x[i + half]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def written_out(drafter: DFlashDrafter, states: Tensor, embeddings: Tensor) -> Tensor:
    """One block behind `states`, row by row and head by head."""
    w = drafter.state_dict()
    D, heads = drafter.config.head_dim, drafter.config.num_attention_heads
    per_kv = heads // drafter.config.num_key_value_heads
    context = [norm(w["fc.weight"] @ row, w["hidden_norm.weight"]) for row in states]
    hidden = list(embeddings)
    for n in range(drafter.config.num_hidden_layers):

        def weight(name: str, n: int = n) -> Tensor:
            return w[f"layers.{n}.{name}.weight"]

        normed = [norm(row, weight("input_layernorm")) for row in hidden]
        keys, values = [], []
        for position, row in enumerate(context + normed):
            k = (weight("self_attn.k_proj") @ row).split(D)
            keys.append([rotate(norm(x, weight("self_attn.k_norm")), position) for x in k])
            values.append((weight("self_attn.v_proj") @ row).split(D))
        for slot, row in enumerate(normed):
            attended = []
            for head, q in enumerate((weight("self_attn.q_proj") @ row).split(D)):
                q = rotate(norm(q, weight("self_attn.q_norm")), len(context) + slot)
                scores = torch.stack([q @ k[head // per_kv] for k in keys]) / D**0.5
                shares = scores.softmax(0)
                attended.append(
                    sum(share * v[head // per_kv] for share, v in zip(shares, values, strict=True))
                )
            hidden[slot] = hidden[slot] + weight("self_attn.o_proj") @ torch.cat(attended)
        for slot, row in enumerate(hidden):
            x = norm(row, weight("post_attention_layernorm"))
            gate, up = weight("mlp.gate_proj") @ x, weight("mlp.up_proj") @ x
            hidden[slot] = row + weight("mlp.down_proj") @ (gate * gate.sigmoid() * up)
    return torch.stack([norm(row, w["norm.weight"]) for row in hidden])


@pytest.mark.numerics
@torch.no_grad()
def test_equals_the_formulas(drafter: DFlashDrafter, inputs: tuple[Tensor, Tensor]) -> None:
    states, embeddings = inputs
    context = drafter.context_kv(states[None], torch.arange(NUM_CONTEXT)[None])
    positions = NUM_CONTEXT + torch.arange(NUM_SLOTS)
    got = drafter(embeddings[None], positions[None], context)[0]
    expected = written_out(drafter, states, embeddings)
    torch.testing.assert_close(got, expected, **tolerances.ROTATED_IN_FP32)


@pytest.mark.numerics
@torch.no_grad()
def test_context_may_come_in_parts(drafter: DFlashDrafter, inputs: tuple[Tensor, Tensor]) -> None:
    states = inputs[0][None]
    positions = torch.arange(NUM_CONTEXT)[None]
    whole = drafter.context_kv(states, positions)
    parts = [drafter.context_kv(states[:, p], positions[:, p]) for p in (slice(4), slice(4, None))]
    for (keys, values), first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat((first[0], second[0]), dim=2), keys, **FP64)
        torch.testing.assert_close(torch.cat((first[1], second[1]), dim=2), values, **FP64)


@pytest.mark.numerics
def test_saves_what_it_loads(drafter_folder: Path, tmp_path: Path) -> None:
    save_drafter(load_drafter(drafter_folder), tmp_path / "again", torch.float32)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (drafter_folder / name).read_bytes()


@pytest.mark.numerics
def test_refuses_another_architecture(target_folder: Path) -> None:
    with pytest.raises(InputError, match=r"expected .*DFlashDraftModel.*Qwen3ForCausalLM"):
        load_drafter(target_folder)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("full_attention", {"causal": True}),  # as JetSpec's
        ("full_attention", {"is_causal": True}),  # which vLLM prefers to `causal`
        ("full_attention", {"use_swa": True, "swa_window_size": 64}),  # as MiMo's
        ("sliding_attention", {}),  # as z-lab's for Gemma
        ("full_attention", {"sample_from_anchor": True}),
    ],
)
def test_refuses_layers_that_see_otherwise(
    drafter_folder: Path, tmp_path: Path, kind: str, keys: dict[str, Any]
) -> None:
    """They would be trained and measured as if they saw the whole context and block."""
    folder = Path(shutil.copytree(drafter_folder, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"][0] = kind
    (config if "is_causal" in keys else config["dflash_config"]).update(keys)
    (folder / "config.json").write_text(json.dumps(config))
    named = next(iter(keys), "layer_types")
    with pytest.raises(InputError, match=rf"expected a drafter whose layers see .*got {named}"):
        load_drafter(folder)


@pytest.mark.numerics
@pytest.mark.parametrize("inside", [True, False])
def test_where_the_block_size_is(drafter_folder: Path, tmp_path: Path, inside: bool) -> None:
    """Newer drafters of z-lab's have it inside dflash_config."""
    folder = Path(shutil.copytree(drafter_folder, tmp_path / "newer"))
    config = json.loads((folder / "config.json").read_text())
    size = config.pop("block_size")
    config["dflash_config"] |= {"block_size": size} if inside else {}
    (folder / "config.json").write_text(json.dumps(config))
    if inside:
        assert load_drafter(folder).config.block_size == size
    else:
        with pytest.raises(InputError, match=r"expected block_size, .* or in its dflash_config"):
            load_drafter(folder)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda text: text[:9], r"config\.json is not JSON"),
        (
            "config.json",
            lambda text: text.replace(b"dflash_config", b"other"),
            r"and a dflash_config with mask_token_id and .*DraftModel'\] and \{\}",
        ),
        (
            "config.json",
            lambda text: text.replace(b'"head_dim": 32', b'"head_dim": 16'),
            "do not fit its config.json: Error.*size mismatch",
        ),
        ("model.safetensors", lambda data: data[:-9], "is not a whole safetensors file"),
    ],
    ids=["no JSON", "another layout", "other sizes", "cut short"],
)
def test_refuses_a_damaged_drafter(
    drafter_folder: Path, tmp_path: Path, file: str, change: Callable[[bytes], bytes], message: str
) -> None:
    folder = Path(shutil.copytree(drafter_folder, tmp_path / "damaged"))
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(InputError, match=message) as refused:
        load_drafter(folder)
    assert "\n" not in str(refused.value)
