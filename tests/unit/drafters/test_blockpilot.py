"""The width predictor: what it sees, what it chooses, what it refuses to load."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tolerances
from vllm_dllm.drafters.blockpilot import (
    TOP_K,
    BlockPilot,
    PredictorConfig,
    load_predictor,
    save_predictor,
    summarize_logits,
)
from vllm_dllm.errors import InputError

pytestmark = pytest.mark.numerics

V = 50
LARGEST = 20.0  # logit
BOTH = pytest.mark.parametrize("variant", ["full", "small"])


def config(variant: str = "small", **changes: object) -> PredictorConfig:
    options = dict(vocab_size=V, block_sizes=(14, 15, 16), trained_block_size=16, hidden_size=32)
    return PredictorConfig(variant, **options | changes)


def test_summary() -> None:
    logits = torch.randn(7, V) * 4
    logits[0, 3:40] = -math.inf
    probs = logits.double().softmax(-1)
    ours = summarize_logits(logits).double()
    share = tolerances.softmax(V, LARGEST)
    best_probs = probs.sort(descending=True).values[:, :TOP_K]
    tolerances.assert_within(ours[:, :TOP_K], best_probs, share * best_probs)
    entropy = torch.special.entr(probs).sum(-1)
    allowed = tolerances.entropy(V, LARGEST, spread=math.log(V))
    tolerances.assert_within(ours[:, TOP_K], entropy, allowed)
    best, second = logits.topk(2).values.unbind(-1)
    assert torch.equal(ours[:, TOP_K + 1].float(), best - second)


def test_summary_of_one_possible_token_is_finite() -> None:
    logits = torch.full((1, V), -math.inf)
    logits[0, 5] = 3.0
    seen = summarize_logits(logits)
    allowed = tolerances.entropy(V, LARGEST, spread=0.0)
    assert seen.isfinite().all() and seen[0, 0] == 1 and seen[0, TOP_K].abs() <= allowed


def test_the_full_variant_is_the_papers() -> None:
    """The raw logits, a layer, a residual one, the scores (AMAP-ML/BlockPilot, predict.py)."""
    predictor = BlockPilot(config("full")).eval()
    logits = torch.randn(5, V)
    weights = predictor.state_dict()
    hidden = (logits @ weights["first.weight"].T + weights["first.bias"]).relu()
    hidden = hidden + (hidden @ weights["second.weight"].T + weights["second.bias"]).relu()
    expected = hidden @ weights["scores.weight"].T + weights["scores.bias"]
    # Three layers of up to V terms; scores are below 4.
    allowed = tolerances.within(3 * tolerances.product(V), size=4.0)
    torch.testing.assert_close(predictor(predictor.make_inputs(logits)), expected, **allowed)


@BOTH
def test_chooses_the_best_score_row_by_row(variant: str) -> None:
    """A row gets the same width whatever else is in the batch, and no dropout."""
    predictor = BlockPilot(config(variant)).eval()
    logits = torch.randn(40, V) * 5
    predictor.fit_input_scale(logits)
    chosen = predictor.predict_widths(logits)
    best = predictor(predictor.make_inputs(logits)).argmax(-1)
    assert chosen.tolist() == [(13, 14, 15)[i] for i in best.tolist()]
    alone = torch.cat([predictor.predict_widths(row[None]) for row in logits])
    assert torch.equal(alone, chosen) and len(chosen.unique()) > 1


def test_standardised() -> None:
    predictor = BlockPilot(config())
    logits = torch.randn(200, V) * 5
    predictor.fit_input_scale(logits)
    seen = predictor.make_inputs(logits)
    # A mean over 200 rows, and one that was subtracted, of what is up to 10 deviations large.
    allowed = 2 * tolerances.total(200) * 10
    torch.testing.assert_close(seen.mean(0), torch.zeros(TOP_K + 2), atol=allowed, rtol=0)
    assert (seen.std(0) < 1.01).all()


@BOTH
def test_saved_and_loaded(variant: str, tmp_path: Path) -> None:
    predictor = BlockPilot(config(variant)).eval()
    predictor.fit_input_scale(torch.randn(20, V))
    save_predictor(predictor, tmp_path)
    loaded = load_predictor(tmp_path, vocab_size=V, trained_block_size=16)
    assert loaded.config == predictor.config and not loaded.training
    logits = torch.randn(30, V)
    assert torch.equal(loaded.predict_widths(logits), predictor.predict_widths(logits))
    assert load_file(tmp_path / "model.safetensors").keys() == predictor.state_dict().keys()


WRONG = {
    "no folder": ({}, {}, "holds no width predictor: expected config.json and model.safetensors"),
    "another target": (
        {},
        {"vocab_size": 60},
        "made for a vocabulary of 50, the target has 60: calibrate one with this target",
    ),
    "another drafter": (
        {},
        {"trained_block_size": 8},
        "block sizes up to 16, the drafter was trained with 8",
    ),
    "something else": ({"predictor": "linear"}, {}, '"predictor": "blockpilot", got \'linear\''),
    "sizes beyond the drafter's": (
        {"block_sizes": [15, 16, 17]},
        {},
        r"2 .* to 16, the block the drafter was trained with, got \[15, 16, 17\]",
    ),
    "no block": ({"block_sizes": [1, 2]}, {}, r"2 .* to 16, .* got \[1, 2\]"),
    "disorder": ({"block_sizes": [16, 15]}, {}, r"ascending block sizes, got \[16, 15\]"),
    "another variant": ({"variant": "huge"}, {}, "full, small, got 'huge'"),
    "a field too few": ({"variant": ...}, {}, "config.json lacks variant: make the predictor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_not_loaded(case: str, tmp_path: Path) -> None:
    changes, served, message = WRONG[case]
    if case != "no folder":
        save_predictor(BlockPilot(config()), tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        kept = {key: value for key, value in (stored | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(InputError, match=message):
        load_predictor(tmp_path, **dict(vocab_size=V, trained_block_size=16) | served)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"config\.json is not JSON .*: copy or download it again"),
        ("model.safetensors", r"model\.safetensors is not a whole safetensors file \(.*: copy or"),
    ],
)
def test_cut_short(name: str, message: str, tmp_path: Path) -> None:
    save_predictor(BlockPilot(config()), tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=message):
        load_predictor(tmp_path, vocab_size=V, trained_block_size=16)


def test_weights_of_another_predictor(tmp_path: Path) -> None:
    save_predictor(BlockPilot(config()), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"some.weight": torch.zeros(2)}, path)
    with pytest.raises(InputError, match=r"do not fit its config\.json: .*some\.weight"):
        load_predictor(tmp_path, vocab_size=V, trained_block_size=16)
