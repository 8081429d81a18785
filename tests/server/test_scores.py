"""Probabilities of a few tokens instead of answers, on the routes that vLLM has for them."""

import hashlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import pytest

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests import tolerances
from tests.engine import reference
from tests.server.conftest import UNCOMPILED, Server, serving
from tests.unit.grammar.canvases import CHANNEL_BEGINS, CHANNEL_ENDS, add_tokens

YES, NO = 505, 506
STATE = "Everything is down, demo at noon."
QUESTIONS: dict[str, Any] = {
    "urgent": {"type": "noul", "instructions": "Needs a reply within the hour?"},
    "kind": {"type": "choice", "instructions": "Of what?", "criteria": {"bug": "a", "praise": "b"}},
    "how": {"type": "score", "instructions": "Severity", "criteria": ["low", "middle", "high"]},
}
ASKED = {
    "urgent": "Question: Needs a reply within the hour?\nyes\nno\nAnswer with yes or no only.",
    "kind": "Question: Of what?\nA: bug - a\nB: praise - b\n"
    "Answer with the letter of one option only.",
    "how": "Question: Severity\n0: low\n1: middle\n2: high\n"
    "Answer with the number of one level only.",
}
"""What the model reads of each question."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/systemone": {"state": STATE, "questions": QUESTIONS},
    "/generative_scoring": {"query": "Up?", "items": ["a", "b"], "label_token_ids": [YES, NO]},
}


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its checkpoint's tokenizer has the tokens that vLLM asks for."""
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("scoring"), canvas_length=64)
    add_tokens(path, {YES: "yes", NO: "no"})
    with serving(path, tmp_path_factory.mktemp("server"), *UNCOMPILED) as server:
        yield server


def decide(server: Server, **body: Any) -> Any:
    return json.loads(server.read("/v1/systemone", {**BODIES["/v1/systemone"], **body}))


def test_decisions_have_the_references_probabilities(scoring: Server) -> None:
    """Of one step on a canvas that holds noise, the end of the turn and padding."""
    model = reference.load(scoring.model)
    found = decide(scoring)
    for name, text in ASKED.items():
        messages = [{"role": "user", "content": f"{STATE}\n\n{text}"}]
        answer = scoring.read("/tokenize", {"model": scoring.model, "messages": messages})
        prompt: list[int] = json.loads(answer)["tokens"]
        noise = random.Random(hashlib.sha256(json.dumps(prompt).encode()).digest())
        turn_ends, thought = tokens_of(scoring, "<turn|>"), tokens_of(scoring, "thought\n")
        canvas = [noise.randrange(model.config.text_config.vocab_size), *turn_ends] + [0] * 14
        prompt += [CHANNEL_BEGINS, *thought, CHANNEL_ENDS]
        scores = reference.first_step_logprobs(model, prompt, canvas)[0]
        labels = {"urgent": [YES, NO], "kind": "AB", "how": "012"}[name]
        ids = [
            token if isinstance(token, int) else tokens_of(scoring, token)[0] for token in labels
        ]
        mass = scores[ids].exp().sum().item()
        expected = [score / mass for score in scores[ids].exp().tolist()]
        assert list(found["answers"][name]["probabilities"].values()) == pytest.approx(
            expected, abs=tolerances.LOGPROB
        )
        assert found["diagnostics"][name]["label_mass"] == pytest.approx(
            mass, rel=tolerances.LOGPROB * len(ids)
        )


def tokens_of(server: Server, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(json.loads(server.read("/tokenize", body))["tokens"])


def test_decisions_are_the_same_beside_other_requests(scoring: Server) -> None:
    alone = [decide(scoring, state=str(i))["answers"] for i in range(4)]

    def answer(seed: int) -> None:
        scoring.client.completions.create(
            model=scoring.model, prompt=[9] * 30, max_tokens=150, seed=seed
        )

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(answer, seed) for seed in range(4)]
        beside = list(pool.map(lambda i: decide(scoring, state=str(i))["answers"], range(4)))
        for other in others:
            other.result()
    for one, two in zip(alone, beside, strict=True):
        for name, first in one.items():
            for label, probability in first["probabilities"].items():
                other = two[name]["probabilities"][label]
                assert abs(probability - other) < tolerances.LOGPROB


@pytest.mark.parametrize("route", BODIES)
def test_scores_take_no_keys(scoring: Server, route: str) -> None:
    assert json.loads(scoring.read(route, BODIES[route]))
    for key in ("vllm_xargs", "diffusion_max_steps"):
        with pytest.raises(HTTPError) as refusal:
            scoring.read(route, {**BODIES[route], key: {}})
        assert refusal.value.code == 400
        message = json.load(refusal.value)["error"]["message"]
        assert message.startswith(f"{key} has no effect in the body on this route.")
