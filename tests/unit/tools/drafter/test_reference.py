"""The reference drafter against DFlash's formulas written out one row at a time in float64."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tolerances
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter.reference import DFlashDrafter, load_drafter, save_drafter

pytestmark = pytest.mark.numerics

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


@torch.no_grad()
def test_equals_the_formulas(drafter: DFlashDrafter, inputs: tuple[Tensor, Tensor]) -> None:
    states, embeddings = inputs
    context = drafter.context_kv(states[None], torch.arange(NUM_CONTEXT)[None])
    positions = NUM_CONTEXT + torch.arange(NUM_SLOTS)
    got = drafter(embeddings[None], positions[None], context)[0]
    expected = written_out(drafter, states, embeddings)
    torch.testing.assert_close(got, expected, **tolerances.ROTATED_IN_FP32)


@torch.no_grad()
def test_context_may_come_in_parts(drafter: DFlashDrafter, inputs: tuple[Tensor, Tensor]) -> None:
    states = inputs[0][None]
    positions = torch.arange(NUM_CONTEXT)[None]
    whole = drafter.context_kv(states, positions)
    parts = [drafter.context_kv(states[:, p], positions[:, p]) for p in (slice(4), slice(4, None))]
    for (keys, values), first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat((first[0], second[0]), dim=2), keys, **FP64)
        torch.testing.assert_close(torch.cat((first[1], second[1]), dim=2), values, **FP64)


def test_saves_what_it_loads(drafter_folder: Path, tmp_path: Path) -> None:
    save_drafter(load_drafter(drafter_folder), tmp_path / "again", torch.float32)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (drafter_folder / name).read_bytes()


def test_refuses_another_architecture(target_folder: Path) -> None:
    with pytest.raises(InputError, match=r"expected .*DFlashDraftModel.*Qwen3ForCausalLM"):
        load_drafter(target_folder)


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
    drafter_folder: Path,
    tmp_path: Path,
    file: str,
    change: Callable[[bytes], bytes],
    message: str,
) -> None:
    folder = Path(shutil.copytree(drafter_folder, tmp_path / "damaged"))
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(InputError, match=message) as refused:
        load_drafter(folder)
    assert "\n" not in str(refused.value)
