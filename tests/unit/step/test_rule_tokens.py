"""What requests' rules name reaches the device as it was asked for, whoever comes with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_dllm.denoise.logit_rules import LogitRules
from vllm_dllm.requests.options import parse_keys
from vllm_dllm.step.logits.filters import LogitFilters
from vllm_dllm.step.slots import NewRequest

V, PROMPT = 12, 3
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
    return NewRequest(slot, params, own, PROMPT, PROMPT, num_steps=8)


@pytest.fixture
def filters() -> LogitFilters:
    req_states: Any = SimpleNamespace(device=torch.device("cpu"), vocab_size=V)
    sampling_states: Any = SimpleNamespace()
    return LogitFilters(req_states, sampling_states)


def tokens_of(flags: torch.Tensor | None) -> list[int] | None:
    return None if flags is None else flags.nonzero().flatten().tolist()


def check(rules: LogitRules, options: dict[str, Any]) -> None:
    bias = options.get("logit_bias")
    if bias is None:
        assert rules.bias is None
    else:
        expected = torch.zeros(V)
        for token, value in bias.items():
            expected[token] = value
        assert rules.bias is not None and torch.equal(rules.bias, expected)
    constrained = options.get("diffusion_constrained")
    allowed = options.get("logprob_token_ids" if constrained else "allowed_token_ids")
    never = {word[0] for word in options.get("bad_words", ()) if len(word) == 1}
    never |= set(range(V)) - set(allowed) if allowed else set()
    assert tokens_of(rules.excluded) == (sorted(never) or None)
    stops = sorted(options.get("stop_token_ids", ()))
    assert (None if rules.early_stops is None else rules.early_stops.tolist()) == (stops or None)
    assert rules.stops_from == (PROMPT + options["min_tokens"] if stops else 0)
    longest = max(map(len, options.get("bad_words", [[0]])))
    assert rules.bad_words.reach == longest - 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_request(filters: LogitFilters, kind: str) -> None:
    filters.add_request(new_request(2, **KINDS[kind]))
    filters.apply_staged_writes()
    assert list(filters._rules) == [2]
    check(filters._rules[2], KINDS[kind])


def test_requests_that_come_together(filters: LogitFilters) -> None:
    for slot, options in enumerate(KINDS.values()):
        filters.add_request(new_request(slot, **options))
    filters.add_request(new_request(len(KINDS)))
    filters.remove_request(1)
    filters.apply_staged_writes()
    filters.apply_staged_writes()
    assert filters._rules.keys() == set(range(len(KINDS))) - {1}
    for slot, options in enumerate(KINDS.values()):
        if slot != 1:
            check(filters._rules[slot], options)


def test_tokens_that_the_model_has_not_are_left_out(filters: LogitFilters) -> None:
    """A tokenizer or a generation_config may name them: no row has such a token."""
    words = [[V], [V, 1], [1, V]]
    filters.add_request(new_request(0, bad_words=words, min_tokens=1, stop_token_ids=[V, V + 5]))
    filters.apply_staged_writes()
    assert not filters._rules
