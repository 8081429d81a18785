"""What a worker keeps of its requests, that it keeps nothing of those that have left, and that what
their rules name reaches the device."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.paths import ROOT
from tests.unit.step.worker import CONTEXT, CPU, MASK, C, GetWorker, V, Worker, noise
from vllm_dllm.denoise import noise as draws
from vllm_dllm.denoise.logit_rules import LogitRules
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.requests.ends import EVERY_BLOCK, NO_END
from vllm_dllm.requests.options import KEYS, STREAM_CANVASES, parse_keys
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits import filters as module
from vllm_dllm.step.logits.filters import LogitFilters
from vllm_dllm.step.masked.masked_step import MaskedStep
from vllm_dllm.step.slots import NewRequest

PROMPT = 7


def numbers(worker: Worker, req_id: str) -> dict[str, int]:
    found = worker.slots.read_numbers(torch.tensor([worker.slot(req_id)]))
    return {name: int(value) for name, value in found._asdict().items()}


@pytest.mark.parametrize(
    ("asked", "end"),
    [
        ({"max_tokens": 20}, PROMPT + 20),
        ({"max_tokens": CONTEXT}, CONTEXT),
        ({"max_tokens": 20, "diffusion_read_only": True}, EVERY_BLOCK),
    ],
    ids=str,
)
def test_where_a_request_ends(worker: GetWorker, asked: dict[str, Any], end: int) -> None:
    one = worker().admit("a", PROMPT, **asked)
    assert numbers(one, "a")["end"] == end and numbers(one, "a")["fitted_end"] == NO_END
    one.admit("fitted", PROMPT, **asked, carried={"fits_canvases": True})
    assert numbers(one, "fitted")["fitted_end"] == end


def test_numbers_of_a_request(worker: GetWorker) -> None:
    one = worker(settings={"window_rule": "symmetric"})
    one.admit("as the server", stop_token_ids=[7, 9], eos=1)
    found = numbers(one, "as the server")
    assert (found["num_steps"], found["width"], found["symmetric_window"]) == (48, C, 1)
    slot = one.slot("as the server")
    assert one.slots.num_stops[slot] == 3
    assert one.slots.stop_tokens[slot, :4].tolist() == [1, 7, 9, -1]
    one.admit("no stops", stop_token_ids=list(range(20)))
    assert one.slots.num_stops[one.slot("no stops")] == 0, "too many to foresee"
    own = {"max_steps": 99, "canvas_length": 2, "window_rule": "reference"}
    one.admit("of its own", **{f"diffusion_{name}": value for name, value in own.items()})
    found = numbers(one, "of its own")
    assert (found["num_steps"], found["width"], found["symmetric_window"]) == (48, 2, 0)


def test_a_warm_up_asks_as_the_server_does(worker: GetWorker) -> None:
    one = worker(settings={"defaults": {"diffusion_max_steps": 5}})
    one.req_states.add_request("a", 3, [1, 2, 3], 0, 1)
    one.sampler.add_request(one.slot("a"), SamplingParams(max_tokens=4))
    one.sampler.apply_staged_writes()
    assert numbers(one, "a")["num_steps"] == 5
    assert not one.asked.joins_commits and not one.asked.are_counted


def test_first_canvases_are_noise_of_their_seeds_and_places(worker: GetWorker) -> None:
    one = worker()
    for i, (seed, prompt) in enumerate([(3, 5), (3, 6), (4, 5)]):
        one.admit(str(i), prompt, seed=seed)
        before = {str(j): one.canvas(str(j)) for j in range(i)}
        key = draws.keys_from_seeds(torch.tensor([seed]))
        places = prompt + torch.arange(C)[None]
        expected = draws.uniform_tokens(key, places, torch.zeros(1), draws.INITIAL, V)
        assert one.canvas(str(i)) == expected[0].tolist()
        assert before == {str(j): one.canvas(str(j)) for j in range(i)}


def test_masked_canvases_are_hidden(worker: GetWorker) -> None:
    one = worker(MaskedStep, "SDARForCausalLM").admit("a")
    slot = one.slot("a")
    one.slots.canvas[slot], one.slots.revealed[slot] = 5, True
    one.leave("a")
    one.admit("b")
    assert one.slot("b") == slot and one.canvas("b") == [MASK] * C
    assert not one.slots.revealed[slot].any()


ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"logit_bias": {3: 20.0}},
    "truncated": {"top_k": 1},
    "log-probabilities": {"logprobs": 1},
    "penalties": {"presence_penalty": 2.0},
    "bad words": {"bad_words": [[7], [8, 9]]},
    "pinned": {"diffusion_seed_canvas": [40] * C, "diffusion_pinned": [1]},
    "predicted": {"diffusion_prediction": [40] * C},
    "a grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-z]+"), "eos": 1},
    "revealing": {"diffusion_acceptance": "top_k", "diffusion_accept_tokens": 1},
    "answer only": {"diffusion_judge_answer_only": True},
    "narrow": {"diffusion_canvas_length": 2},
}
NOT_PLAIN = {"pinned", "predicted", "a grammar"}


@pytest.mark.parametrize("kind", ASKED)
def test_nothing_is_kept_of_a_request_that_left(worker: GetWorker, kind: str) -> None:
    """Whose slot the next one has: its steps are those that it has in a slot of its own."""
    used, fresh = worker(num_workers=2), worker()
    used.admit("a", **ASKED[kind])
    batch = used._batch({"a": C}, late=0)
    used.stepping.begin_step(batch)
    assert used.stepping.batch is not None
    assert used.asked.are_plain(used.stepping.batch) == (kind not in NOT_PLAIN)
    used.step({"a": noise(2 if kind == "narrow" else C)})
    slot = used.slot("a")
    used.leave("a")
    for one in (used, fresh):
        one.admit("b", seed=4, diffusion_max_steps=3)
    assert used.slot("b") == slot
    batch = CanvasBatch.build(used._batch({"b": C}, late=0), C, CPU)
    assert used.asked.are_plain(batch) and not used.asked.filters.needs_whole_rows(batch)
    for step in range(3):
        assert used.canvas("b") == fresh.canvas("b")
        found, expected = (one.step({"b": noise(C, step)}) for one in (used, fresh))
        assert found == expected and found.logprobs is None
    assert len(used.answer("b")) == C and NO_TOKEN not in used.answer("b")


FORM = StructuredOutputsParams(regex="[a-z]+")
ALONE: dict[str, dict[str, Any]] = {  # what a request asks for by the parameter of this name
    **{name: {name: 0.5} for name in ("temperature", "top_p", "min_p")},
    **{name: {name: 2} for name in ("max_tokens", "min_tokens", "top_k", "logprobs")},
    **{name: {name: 1.5} for name in ("presence_penalty", "frequency_penalty")},
    **{name: {name: [5]} for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "seed": {"seed": 7},
    "n": {"n": 2},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "ignore_eos": {"ignore_eos": True},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "bad_words": {"bad_words": [[7], [8, 9]]},
    "structured_outputs": {"structured_outputs": FORM, "eos": 1},
    **{f"diffusion_{name}": {f"diffusion_{name}": 0.5} for name in (
        "entropy_bound", "accept_probability", "confidence_threshold",
    )},
    **{f"diffusion_{name}": {f"diffusion_{name}": 2} for name in (
        "max_steps", "canvas_length", "accept_tokens", "stability_threshold", "load_stages",
    )},
    **{f"diffusion_{name}": {f"diffusion_{name}": True} for name in (
        "read_only", "judge_answer_only",
    )},
    "diffusion_constrained": {"diffusion_constrained": True, "logprob_token_ids": [5, 6]},
    **{f"diffusion_{name}": {f"diffusion_{name}": [40] * C} for name in (
        "seed_canvas", "prediction",
    )},
    "diffusion_pinned": ASKED["pinned"],
    "diffusion_window_rule": {"diffusion_window_rule": "symmetric"},
    "diffusion_t_min": {"diffusion_t_min": 0.1, "diffusion_t_max": 0.2},
    "diffusion_t_max": {"diffusion_t_min": 0.1, "diffusion_t_max": 0.2},
    "diffusion_acceptance": {"diffusion_acceptance": "confidence"},
}  # fmt: skip


def is_said_to_be_fused(name: str) -> bool:
    """By docs/performance.md, which names everything once."""
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (fused|small operations)\b", page, re.MULTILINE)
    (path,) = (path for asked, path in rows if f"`{name}`" in asked)
    return bool(path == "fused")


@pytest.mark.parametrize("name", ALONE)
def test_the_page_says_which_path_steps_take(worker: GetWorker, name: str) -> None:
    one = worker().admit("a", **ALONE[name])
    batch = CanvasBatch.build(one._batch({"a": C}, late=0), C, CPU)
    assert one.stepping._is_plain(batch) == is_said_to_be_fused(name)


def test_the_page_names_every_key() -> None:
    of_masked = {key for key, mark in KEYS.items() if not mark.uniform}
    assert KEYS.keys() == {key for key in ALONE if key in KEYS} | of_masked | {STREAM_CANVASES}
    assert not any(map(is_said_to_be_fused, of_masked | {STREAM_CANVASES}))


def test_a_resumed_request_is_known_as_one(worker: GetWorker) -> None:
    """Its first block may be over: the client's canvas is not put in the place of a later one."""
    one = worker()
    asked = ASKED["pinned"]
    one.admit("a", **asked)
    assert one.canvas("a") == asked["diffusion_seed_canvas"]
    one.leave("a")
    one.requests["a"].tokens += [50, 51, 52, 53]
    one.place("a")
    assert one.canvas("a") != asked["diffusion_seed_canvas"]
    assert not one.slots.pinned[one.slot("a")].any()


VOCAB, PROMPT_LEN = 12, 3
KINDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {5: 0.1, 0: -1e-30, 11: 1e9}},
    "allowed": {"allowed_token_ids": [4, 1]},
    "never": {"bad_words": [[7], [2]]},
    "allowed but for one": {"allowed_token_ids": [4, 1], "bad_words": [[1]]},
    "constrained": {"logprob_token_ids": [3, 8], "diffusion_constrained": True},
    "early stops": {"min_tokens": 2, "stop_token_ids": [9, 6]},
    "long words": {"bad_words": [[1, 2, 3]]},
    "all": {
        "logit_bias": {1: 2.5},
        "allowed_token_ids": [1, 2, 3],
        "bad_words": [[2], [1, 3]],
        "min_tokens": 1,
        "stop_token_ids": [3],
    },
}


def new_request(slot: int, **options: Any) -> NewRequest:
    extra = {name: options.pop(name) for name in list(options) if name.startswith("diffusion_")}
    words = options.pop("bad_words", None)
    params = SamplingParams(max_tokens=9, **options)
    params._bad_words_token_ids = words
    params._all_stop_token_ids = set(options.get("stop_token_ids", ()))
    own = parse_keys(extra, {}, None)
    return NewRequest(slot, params, own, PROMPT_LEN, PROMPT_LEN, num_steps=8)


@pytest.fixture
def filters() -> LogitFilters:
    req_states: Any = SimpleNamespace(device=torch.device("cpu"), vocab_size=VOCAB)
    sampling_states: Any = SimpleNamespace()
    return LogitFilters(req_states, sampling_states)


def tokens_of(flags: torch.Tensor | None) -> list[int] | None:
    return None if flags is None else flags.nonzero().flatten().tolist()


def check(rules: LogitRules, options: dict[str, Any]) -> None:
    bias = options.get("logit_bias")
    if bias is None:
        assert rules.bias is None
    else:
        expected = torch.zeros(VOCAB)
        for token, value in bias.items():
            expected[token] = value
        assert rules.bias is not None and torch.equal(rules.bias, expected)
    constrained = options.get("diffusion_constrained")
    allowed = options.get("logprob_token_ids" if constrained else "allowed_token_ids")
    never = {word[0] for word in options.get("bad_words", ()) if len(word) == 1}
    never |= set(range(VOCAB)) - set(allowed) if allowed else set()
    assert tokens_of(rules.excluded) == (sorted(never) or None)
    stops = sorted(options.get("stop_token_ids", ()))
    assert (None if rules.early_stops is None else rules.early_stops.tolist()) == (stops or None)
    assert rules.stops_from == (PROMPT_LEN + options["min_tokens"] if stops else 0)
    longest = max(map(len, options.get("bad_words", [[0]])))
    assert rules.bad_words.reach == longest - 1


def test_requests_that_come_together(
    filters: LogitFilters, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    copy = module.async_tensor_h2d

    def counted(numbers: Any, device: torch.device) -> torch.Tensor:
        copies.append(len(numbers))
        return copy(numbers, device=device)

    monkeypatch.setattr(module, "async_tensor_h2d", counted)
    for slot, options in enumerate(KINDS.values()):
        filters.add_request(new_request(slot, **options))
    filters.add_request(new_request(len(KINDS)))
    filters.remove_request(1)
    filters.apply_staged_writes()
    filters.apply_staged_writes()
    assert len(copies) == 1
    assert filters._rules.keys() == set(range(len(KINDS))) - {1}
    for slot, options in enumerate(KINDS.values()):
        if slot != 1:
            check(filters._rules[slot], options)


def test_tokens_that_the_model_has_not_are_left_out(filters: LogitFilters) -> None:
    """A tokenizer or a generation_config may name them: no row has such a token."""
    words = [[VOCAB], [VOCAB, 1], [1, VOCAB]]
    filters.add_request(
        new_request(0, bad_words=words, min_tokens=1, stop_token_ids=[VOCAB, VOCAB + 5])
    )
    filters.apply_staged_writes()
    assert not filters._rules
