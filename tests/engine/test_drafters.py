"""A drafter changes no output, whatever the width policy, and drafts what its reference drafts."""

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from tests import tolerances
from tests.engine.conftest import HELD_OUT, chat_tokens
from tests.engine.drafters import (
    ALONE,
    DRAFTER,
    TARGET,
    WIDTH,
    Recorder,
    Served,
    ask,
    drafting,
    make_dflash2,
    serve,
    started,
)
from tests.engine.one_step import is_best_guess
from tests.engine.rounding import add_noise
from vllm_dllm.compat import version
from vllm_dllm.drafters.blockpilot import BlockPilot, PredictorConfig, save_predictor
from vllm_dllm.tools.drafter.measurements import Replayed, replay
from vllm_dllm.tools.drafter.reference import load_drafter, load_target

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

BLOCK_SIZE = 128  # tokens of vLLM's cache blocks on CPUs
GREEDY = {"temperature": 0.0, "max_tokens": 128}


def chat_prompts() -> list[list[int]]:
    """The held-out prompts, all 506 of them."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [chat_tokens(tokenizer, row["messages"]) for row in HELD_OUT]


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    """All held-out prompts: the target alone, and drafted for."""
    prompts = chat_prompts()
    alone, drafted = (serve(options, prompts, GREEDY) for options in (ALONE, drafting()))
    return {"prompts": prompts, "alone": alone, "drafted": drafted}


@torch.no_grad()
def require_same_answers(prompts: list[list[int]], served: Served, alone: Served) -> None:
    """But behind a token beside which the target finds another as probable, within rounding."""
    target = load_target(TARGET, "cpu")
    num_parted = 0
    for prompt, one, other in zip(prompts, served.tokens, alone.tokens, strict=True):
        if one == other:
            continue
        step = next(i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1)
        logits = target.model(torch.tensor([prompt + one[:step]])).logits[0, -1]
        for token in (one[step], other[step]):
            assert is_best_guess(token, logits.log_softmax(-1)), f"token {step} of {one}"
        num_parted += 1
    assert num_parted <= tolerances.PARTED * len(prompts)


def test_same_answers_as_the_target_alone(everything: dict[str, Any]) -> None:
    assert len(everything["prompts"]) >= 500
    require_same_answers(everything["prompts"], everything["drafted"], everything["alone"])


def test_acceptance_length(everything: dict[str, Any]) -> None:
    """tau of the shipped drafter, which each verification's length has a share in."""
    emitted = [n for lengths in everything["drafted"].emitted for n in lengths]
    assert sum(emitted) / len(emitted) >= 4


def replay_with_noise(
    prompts: list[list[int]], answers: list[list[int]]
) -> list[tuple[Replayed, set[int]]]:
    """What the reference drafts behind each token of the answers, and the tokens behind which noise
    in its weights changes that."""
    target, drafter = load_target(TARGET, "cpu"), load_drafter(DRAFTER)
    exact = replay(target, drafter, prompts, answers, WIDTH)
    undecided: list[set[int]] = [set() for _ in exact]
    for seed in range(tolerances.NOISES):
        noisy = load_drafter(DRAFTER)
        add_noise(noisy, seed)
        others = replay(target, noisy, prompts, answers, WIDTH)
        for anchors, one, other in zip(undecided, exact, others, strict=True):
            pairs = enumerate(zip(one.matches, other.matches, strict=True))
            anchors |= {anchor for anchor, (matches, noised) in pairs if matches != noised}
    return list(zip(exact, undecided, strict=True))


def test_each_verification_emits_what_the_reference_says(everything: dict[str, Any]) -> None:
    """Lengths follow from where each block starts: behind what was accepted, not drafted."""
    some = slice(0, None, 7)
    prompts, answers = everything["prompts"][some], everything["drafted"].tokens[some]
    compared = 0
    for emitted, (expected, undecided) in zip(
        everything["drafted"].emitted[some], replay_with_noise(prompts, answers), strict=True
    ):
        lengths = expected.emitted_lengths(WIDTH)
        if undecided & set(accumulate(lengths[:-1], initial=0)):
            continue
        # Of the last one the reference counts no tokens past the end of the answer.
        assert emitted[:-1] == lengths[:-1] and len(emitted) == len(lengths)
        compared += 1
    assert compared >= tolerances.DECIDED * len(prompts)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has learnt nothing: any choice of width must do."""
    torch.manual_seed(0)
    vocab_size = json.loads((TARGET / "config.json").read_text())["vocab_size"]
    path = tmp_path_factory.mktemp("predictor")
    config = PredictorConfig("small", vocab_size, (4, 9, 16), 16, 64)
    save_predictor(BlockPilot(config), path)
    return path


BLOCKPILOT = {"width_policy": "blockpilot"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": drafting({"width": 5}),
    "asynchronous": drafting({"width_policy": "acceptance"}, async_scheduling=True),
    "acceptance": drafting({"width_policy": "acceptance", "narrow_draft": True}),
    "load": drafting({"width_policy": "load", "load_rows": 40}),
    "no room for drafts": drafting({"width_policy": "load", "load_rows": 1}),
    "blockpilot": drafting(BLOCKPILOT),
    "short contexts": drafting({"max_context": 60}),
    "window": drafting({"draft_window": 32}),
    "steps": drafting({"draft_steps": 3, "schedule": "linear"}),
    "probabilistic": drafting(speculative={"draft_sample_method": "probabilistic"}),
    "prefix caching off": drafting(enable_prefix_caching=False),
    "wider than trained": drafting(speculative={"num_speculative_tokens": WIDTH + 2}),
    "by batch size": drafting(
        speculative={"num_speculative_tokens_per_batch_size": [[1, 8, 9], [9, 16, 2]]}
    ),
}


@pytest.fixture(scope="module")
def by_setting(predictor: Path) -> dict[str, Served]:
    BLOCKPILOT["predictor"] = str(predictor)
    prompts, settings = chat_prompts()[::21], SETTINGS | {"alone": ALONE}
    return {name: serve(options, prompts, GREEDY) for name, options in settings.items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_an_answer(by_setting: dict[str, Served], setting: str) -> None:
    require_same_answers(chat_prompts()[::21], by_setting[setting], by_setting["alone"])


def require_reference_lengths(served: Served, prompts: list[list[int]]) -> None:
    """Each verification emits what the reference says of a draft behind that token, whatever the
    requests have been through."""
    compared = in_all = 0
    for (one, undecided), emitted, verified in zip(
        replay_with_noise(prompts, served.tokens), served.emitted, served.verified, strict=True
    ):
        for length, (anchor, num_drafts) in zip(emitted, verified, strict=True):
            left = len(one.answer) - 1 - anchor  # what follows the answer is dropped
            if left > 0:
                in_all += 1
            if left > 0 and anchor not in undecided:
                expected = min(one.matches[anchor], num_drafts) + 1
                assert min(length, left) == min(expected, left)
                compared += 1
    assert compared >= tolerances.DECIDED * in_all


@pytest.mark.parametrize("setting", ["asynchronous", "load", "short contexts"])
def test_each_verification_with_a_setting_emits_what_the_reference_says(
    by_setting: dict[str, Served], setting: str
) -> None:
    require_reference_lengths(by_setting[setting], chat_prompts()[::21])


def test_asynchronous_is_asynchronous(by_setting: dict[str, Served]) -> None:
    assert by_setting["asynchronous"].is_asynchronous
    assert not by_setting["fixed"].is_asynchronous


def test_vllm_keeps_no_more_than_the_drafters_window(by_setting: dict[str, Served]) -> None:
    """Its cache manager frees the blocks behind a sliding window, of the drafter's group alone."""
    assert set(by_setting["fixed"].windows) == {None}
    windows = by_setting["window"].windows  # vLLM splits the target's layers into groups, too
    assert windows.count(32) == 1 and set(windows) == {None, 32}


def test_no_more_is_accepted_than_the_width(by_setting: dict[str, Served]) -> None:
    lengths = {
        setting: [n for emitted in by_setting[setting].emitted for n in emitted]
        for setting in SETTINGS
    }
    assert max(lengths["fixed"]) == 6
    assert max(lengths["prefix caching off"]) > 6
    assert max(lengths["wider than trained"]) == WIDTH + 3
    assert lengths["no room for drafts"] == []
    # The predictor chooses blocks of 4, 9 and 16; the widest holds until it has spoken.
    assert lengths["blockpilot"] and max(lengths["blockpilot"]) <= 16
    verified = by_setting["by batch size"].verified
    assert verified[0][0][1] == 2
    assert max(width for request in verified for _, width in request) == 9


def test_long_contexts_are_not_drafted_for(by_setting: dict[str, Served]) -> None:
    prompts = chat_prompts()[::21]
    emitted = by_setting["short contexts"].emitted
    long = [lengths for prompt, lengths in zip(prompts, emitted, strict=True) if len(prompt) > 60]
    short = [lengths for prompt, lengths in zip(prompts, emitted, strict=True) if len(prompt) < 30]
    assert long and not any(long)
    assert short and all(short)


def test_drafting_is_taken_up_again_as_if_it_had_never_stopped() -> None:
    """Nothing is drafted while the batch is full. What the drafter then sees of the requests that
    are left has been stored meanwhile, much of it later than it was computed."""
    prompts = sorted(chat_prompts(), key=len)[:480:15]
    options = drafting({"width_policy": "load", "load_rows": 40}, max_num_seqs=len(prompts))
    sampling = [
        GREEDY | {"ignore_eos": True, "max_tokens": 80 if i % 4 == 0 else 40}
        for i in range(len(prompts))
    ]
    served = serve(options, prompts, sampling)
    breaks = [
        after - before
        for verified in served.verified
        for (before, _), (after, _) in pairwise([(0, 0), *verified])
    ]
    assert sum(tokens > WIDTH + 1 for tokens in breaks) >= 5
    require_reference_lengths(served, prompts)


def test_what_is_too_long_leaves_a_cache_that_others_can_draft_from() -> None:
    """The longer prompt is not drafted for and not stored for the drafter to its end; the other
    finds its own beginning in the prefix cache."""
    blocks = 2 * BLOCK_SIZE
    # Before 0.33, vLLM computes the last one again, for the drafter.
    found = blocks if version.is_at_least("0.33") else BLOCK_SIZE
    short = next(prompt for prompt in chat_prompts() if blocks < len(prompt) < blocks + 40)
    long = short[:-8] + short[:80]
    options = drafting({"max_context": blocks + 70}, max_num_seqs=1)
    served = serve(options, [long, short], GREEDY | {"max_tokens": 24})
    assert not served.emitted[0] and served.cached == [0, found]
    assert max(served.emitted[1]) > 3
    require_reference_lengths(served, [long, short])


def test_placeholders_that_fill_rows_are_not_taken_for_drafts() -> None:
    """vLLM gives a prompt of one token that comes beside running requests as many rows as those
    would have with drafts. Here there is no room for any."""
    lengths = (40, 2, 10)  # the third prompt comes when the second is answered
    prompts = [*chat_prompts()[:2], chat_prompts()[0][:1]]
    sampling = [GREEDY | {"ignore_eos": True, "max_tokens": length} for length in lengths]
    options = drafting({"width_policy": "load", "load_rows": 1}, max_num_seqs=2)
    served = serve(options, prompts, sampling)
    assert served.verified == [[], [], []]
    require_same_answers(prompts, served, serve(ALONE, prompts, sampling))


def test_a_step_under_way_when_all_requests_end_reads_token_ids() -> None:
    """The first answer is one token, behind which nothing is drafted; the second ends with its
    first token, when a step is scheduled that verifies its drafts."""
    prompt = chat_prompts()[0]
    (first,) = serve(ALONE, [prompt], GREEDY | {"max_tokens": 1}).tokens
    sampling = [GREEDY | {"max_tokens": 1}, GREEDY | {"stop_token_ids": first}]
    options = drafting(max_num_seqs=1, async_scheduling=True)
    served = serve(options, [prompt, prompt], sampling)
    assert served.tokens == [first, first]


def test_tokens_are_drawn_from_the_targets_distribution() -> None:
    """20,000 sampled tokens, each placed in the target's distribution at its context: the places
    of right ones are uniform."""
    prompts = chat_prompts()[::2] * 3
    sampling = {"temperature": 1.5, "max_tokens": 28, "ignore_eos": True}
    options = drafting(speculative={"draft_sample_method": "probabilistic"})
    served = serve(options, prompts, sampling)
    emitted = [n for lengths in served.emitted for n in lengths]
    assert 1.2 < sum(emitted) / len(emitted) < 10, "some drafts are accepted, and some refused"

    target = load_target(TARGET, "cpu")
    generator = torch.Generator().manual_seed(0)
    places = []
    for prompt, answer in zip(prompts, served.tokens, strict=True):
        tokens = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = target.model(tokens).logits[0, len(prompt) - 1 : -1].double()
        probs = (logits / sampling["temperature"]).softmax(dim=-1)
        drawn = torch.tensor(answer)[:, None]
        own = probs.gather(1, drawn)
        # The more probable tokens come first; of its own share a token has a random place.
        before = torch.where(probs > own, probs, 0.0).sum(dim=1, keepdim=True)
        places.append(before + own * torch.rand(own.shape, generator=generator).double())
    placed = torch.cat(places).flatten()[:20_000]
    assert len(placed) == 20_000
    observed = torch.histc(placed, bins=40, min=0.0, max=1.0)
    assert stats.chisquare(observed.numpy()).pvalue > tolerances.P_VALUE


@pytest.mark.parametrize(
    ("mode", "rows_at_once", "options"),
    [
        ("raw_logprobs", 999, {}),
        ("raw_logprobs", 999, {"async_scheduling": True}),
        ("processed_logprobs", 20, {}),
        ("raw_logits", 999, {}),
    ],
)
def test_named_tokens_are_scored_beside_drafts(
    monkeypatch: pytest.MonkeyPatch, mode: str, rows_at_once: int, options: dict[str, Any]
) -> None:
    """The tokens of `logprob_token_ids`, at each token of an answer. Other requests of the step
    want drafts verified, the most probable tokens, or one token and nothing else."""
    monkeypatch.setattr(rejection_sampler, "get_max_chunk_logits", lambda size: rows_at_once)
    prompts, named = chat_prompts()[:12], [3, 7, 400]
    wanted: list[dict[str, Any]] = [
        {"logprob_token_ids": named, "max_tokens": 1},
        {"logprob_token_ids": named[:2], "max_tokens": 20},
        {"logprobs": 4, "max_tokens": 20},
        {"max_tokens": 40},
    ]
    asked = [wanted[i % len(wanted)] for i in range(len(prompts))]
    params = [SamplingParams(temperature=0, ignore_eos=True, **each) for each in asked]
    with started(drafting(logprobs_mode=mode, max_num_seqs=5, **options)) as llm:
        recorder = Recorder(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert max(max(lengths) for lengths in recorder.emitted.values()) > 4
    target = load_target(TARGET, "cpu")
    for prompt, each, output in zip(prompts, asked, outputs, strict=True):
        answer = output.outputs[0]
        with torch.no_grad():
            rows = target.model(torch.tensor([prompt + list(answer.token_ids)])).logits[0]
        rows = rows[len(prompt) - 1 : -1]
        rows = rows if mode == "raw_logits" else rows.log_softmax(-1)
        if set(each) == {"max_tokens"}:
            assert not answer.logprobs
            continue
        scores = answer.logprobs
        assert scores is not None and len(scores) == len(answer.token_ids) == each["max_tokens"]
        for token, row, score in zip(answer.token_ids, rows, scores, strict=True):
            tokens = each.get("logprob_token_ids") or row.topk(each["logprobs"]).indices.tolist()
            assert set(score) == {token, *tokens}
            for scored, found in score.items():
                assert abs(found.logprob - row[scored].item()) < tolerances.LOGIT


def test_dummy_weights_and_weight_updates() -> None:
    """Dummy weights are answered with. A trainer's are refused, since CPU kernels have packed the
    old ones: vLLM would take the old ones away first, and every later step would fail."""
    asked = chat_prompts()[:2], GREEDY | {"ignore_eos": True}
    with started(drafting(load_format="dummy", weight_transfer_config={"backend": "ipc"})) as llm:
        before = ask(llm, *asked).tokens
        assert [len(answer) for answer in before] == [128, 128]
        for begin in (llm.start_weight_update, llm.start_draft_weight_update):
            with pytest.raises(ValueError, match="cannot be reloaded on CPUs"):
                begin()
        assert ask(llm, *asked).tokens == before


@pytest.mark.parametrize(
    "architecture",
    ["DFlashDraftModel", pytest.param("DFlash2DraftModel", marks=pytest.mark.thorough)],
)
def test_a_drafter_of_no_numbers_drafts_nothing(tmp_path: Path, architecture: str) -> None:
    """And ends no engine: answers are the target's, drawn ones too. Its weights are numbers, or it
    would not be loaded, but what it computes of them is not."""
    path = make_dflash2(tmp_path / "drafter")
    weights = load_file(path / "model.safetensors")
    if architecture == "DFlashDraftModel":
        weights = {name: weights[name] for name in load_file(DRAFTER / "model.safetensors")}
        (path / "config.json").write_text((DRAFTER / "config.json").read_text())
    for weight in weights.values():
        weight[..., 0] = torch.finfo(weight.dtype).max
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    prompts = chat_prompts()[:6]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    speculative = {"model": str(path), "draft_sample_method": "probabilistic"}
    with started(drafting(speculative=speculative)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    target = load_target(TARGET, "cpu")
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        answer = list(output.outputs[0].token_ids)
        assert len(answer) == 24
        if i % 2 == 0:
            with torch.no_grad():
                logits = target.model(torch.tensor([prompt + answer])).logits[0]
            for token, row in zip(answer, logits[len(prompt) - 1 :], strict=False):
                assert is_best_guess(token, row.log_softmax(-1))
