"""`reload_weights` and sleep with a drafter, which keeps its own weights. test_reloading.py says
what a reload must do."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.drafters import ask, started
from tests.engine.one_step import random_ids
from tests.engine.reloads import altered, reload, sleep_and_wake
from tests.paths import CHECKPOINTS

TARGET, DRAFTER = CHECKPOINTS / "qwen3-tiny-target", CHECKPOINTS / "qwen3-tiny-dflash"
PROMPTS = [random_ids(length, 256, seed=length) for length in (3, 40, 300)]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True},
    {"temperature": 0.8, "seed": 1, "max_tokens": 48, "ignore_eos": True},
    {"temperature": 0.8, "seed": 2, "max_tokens": 48, "ignore_eos": True},
]
ASKED: dict[str, Any] = {"prompts": PROMPTS, "sampling": SAMPLING}


def options(target: Path) -> dict[str, Any]:
    speculative = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": 15}
    return {"model": str(target), "max_model_len": 512, "speculative_config": speculative}


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return altered(TARGET, tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="module")
def of_second(second: Path) -> dict[str, Any]:
    """By an engine that was started with these weights: answers, and what drafts were worth."""
    with started(options(second)) as llm:
        return ask(llm, ASKED)


def test_answers_are_those_of_the_target(second: Path, of_second: dict[str, Any]) -> None:
    """Seeded ones, too, and every verification accepts what it did: drafts are the drafter's own,
    of states that the new weights made. No prefix of the old ones is found."""
    with started(options(TARGET)) as llm:
        of_first = ask(llm, ASKED)
        pairs = zip(of_first["tokens"], of_second["tokens"], strict=True)
        assert all(a != b for a, b in pairs)
        reload(llm, second)
        assert ask(llm, ASKED) == of_second
        sleep_and_wake(llm)
        assert ask(llm, ASKED)["tokens"] == of_second["tokens"]
        reload(llm, TARGET)
        assert ask(llm, ASKED) == of_first


def test_in_the_middle_of_answers(second: Path, of_second: dict[str, Any]) -> None:
    """Running requests end, with all their tokens; later ones know nothing of them."""
    with started(options(TARGET)) as llm:
        core = llm.llm_engine
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=48, seed=i, ignore_eos=True, detokenize=False)
            core.add_request(f"running-{i}", {"prompt_token_ids": prompt}, params)
        for _ in range(2):
            core.step()
        assert core.has_unfinished_requests()
        reload(llm, second)
        done = {}
        while core.has_unfinished_requests():
            done |= {out.request_id: out for out in core.step() if out.finished}
        assert [len(out.outputs[0].token_ids) for out in done.values()] == [48] * len(PROMPTS)
        reload(llm, second)  # keys of what has just run are the new weights'; none are kept
        assert ask(llm, ASKED) == of_second
