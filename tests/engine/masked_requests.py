"""Requests to masked models, what is read of their steps, and that neighbours change none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import RequestOutput, SamplingParams

from tests import tolerances
from tests.engine.conftest import Engine
from tests.engine.fast_dllm import ShiftedReference
from tests.engine.levenshtein import LevenshteinReference
from tests.engine.masked import Reference, Rule, Step, Trajectory, make_checkpoint
from tests.engine.nemotron import FirstTokenReference
from tests.engine.one_step import random_ids

VOCABULARY = 512
RULES = {
    "dynamic": Rule("dynamic", threshold=0.5),
    "dynamic in few steps": Rule("dynamic", num_steps=3, threshold=0.5),
    "static": Rule("static", num_steps=3),
    "in order": Rule("sequential", num_steps=2),
    "by entropy": Rule("entropy", bound=2.0),
    "edited": Rule("dynamic", threshold=0.4, edit=0.3, most_edit_steps=3),
    "warm": Rule("dynamic", threshold=0.3, temperature=1.0),
}


AT_ONCE = Rule("static", num_steps=1)


class Family(NamedTuple):
    architecture: str
    reference: type[Reference] = Reference
    rules: dict[str, Rule] = RULES
    often: frozenset[tuple[int, str]] = frozenset()  # what is tried by every run of the tests, by
    # block length and rule; a thorough one tries all


SEEDED_RULES = {name: RULES[name] for name in ("dynamic", "static", "in order")} | {
    "dynamic in few steps": RULES["dynamic in few steps"],
    "warm": Rule("dynamic", threshold=0.3, temperature=0.8),
}
MOVING_RULES = {
    "published": Rule(threshold=0.5, edit=0.0),
    "published in few steps": Rule(threshold=0.5, edit=0.0, num_steps=2, most_edit_steps=3),
    "static": Rule("static", num_steps=3, edit=0.5, most_edit_steps=2),
    "warm": Rule(threshold=0.3, edit=0.2, most_edit_steps=5, temperature=0.8),
}
FAMILIES = {
    "SDAR": Family(
        "SDARForCausalLM",
        often=frozenset(
            [(32, "dynamic"), *((4, name) for name in ("static", "in order", "by entropy", "warm"))]
        ),
    ),
    "MoE": Family("SDARMoeForCausalLM", often=frozenset([(4, "dynamic")])),
    "LLaDA2": Family("LLaDA2MoeModelLM", often=frozenset([(4, "edited")])),
    "LLaDA2.2": Family(
        "LLaDA2.2", LevenshteinReference, MOVING_RULES, frozenset([(32, "published"), (4, "warm")])
    ),
    "Nemotron": Family(
        "NemotronLabsDiffusionModel",
        FirstTokenReference,
        SEEDED_RULES,
        frozenset([(32, "dynamic"), *((4, name) for name in ("dynamic", "static", "warm"))]),
    ),
    "Fast-dLLM": Family(
        "Fast_dLLM_QwenForCausalLM",
        ShiftedReference,
        {
            "published": Rule("dynamic", threshold=1.0),
            "verified": Rule("verified"),
            "verified, warm": Rule("verified", temperature=0.5),
            **SEEDED_RULES,
        },
        frozenset(
            [
                *((32, name) for name in ("dynamic", "verified")),
                *((4, name) for name in ("published", "dynamic", "warm", "verified, warm")),
            ]
        ),
    ),
}


class Made(NamedTuple):
    checkpoint: Path
    reference: Any


GetMade = Callable[[str, int], Made]


def each(*families: str, thorough: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """One family after the other, so that an engine serves all tests of one."""
    cases = [*families, *(pytest.param(name, marks=pytest.mark.thorough) for name in thorough)]
    return pytest.mark.parametrize("family", cases, scope="module")


def make(folder: Path, family: str, block_length: int) -> Made:
    """A checkpoint and what it is compared with."""
    kind = FAMILIES[family]
    checkpoint, plain = make_checkpoint(folder, block_length, kind.architecture)
    return Made(checkpoint, kind.reference(plain.model, block_length, plain.mask_id))


ACCEPTANCE = {
    "dynamic": "confidence",
    "static": "top_k",
    "sequential": "in_order",
    "entropy": "entropy_bound",
    "verified": "verified",
}


def prompts_of(block_length: int) -> list[list[int]]:
    B = block_length
    lengths = (1, B - 1, B, B + 1, 3 * B + 1)
    return [random_ids(length, VOCABULARY, seed) for seed, length in enumerate(lengths)]


def params_of(rule: Rule, max_tokens: int, seed: int, **options: Any) -> SamplingParams:
    extra: dict[str, Any] = {"diffusion_acceptance": ACCEPTANCE[rule.name]}
    if rule.name != "verified":
        extra["diffusion_accept_probability"] = rule.threshold
        extra["diffusion_entropy_bound"] = rule.bound
    if rule.edit is not None:
        extra["diffusion_edit_probability"] = rule.edit
        extra["diffusion_edit_steps"] = rule.most_edit_steps
    if rule.num_steps is not None:
        extra["diffusion_max_steps"] = rule.num_steps
    return SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=seed,
        temperature=rule.temperature,
        extra_args=extra,
        **options,
    )


def served(engine: Engine, outputs: list[RequestOutput]) -> list[Trajectory]:
    found = []
    for output in outputs:
        steps = [
            Step(line["tokens"], line["accepted"], line["canvas"], line["finished"])
            for line in engine.steps(output.request_id)
        ]
        found.append(Trajectory(steps, list(output.outputs[0].token_ids)))
    return found


def generate(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[Trajectory]:
    engine.trace.write_text("")
    return served(engine, engine.ask(prompts, params))


def count_forwards(model: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every forward from now on, by the tokens of each."""
    core = model.llm.llm_engine.engine_core.engine_core
    forwards: list[int] = []
    execute = core.model_executor.execute_model

    def counted(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens:
            forwards.append(output.total_num_scheduled_tokens)
        return execute(output, *args, **kwargs)

    monkeypatch.setattr(core.model_executor, "execute_model", counted)
    return forwards


KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.0, "repetition_penalty": 1.3},
    {"bad_words": ["lamp", "a", "ab", "9 1"]},
    {"top_k": 9, "top_p": 0.9},
    {"logprobs": 2},
    {"min_tokens": 40, "stop_token_ids": list(range(0, 512, 9))},
]


def assert_scores(expected: torch.Tensor, found: Any) -> None:
    """`expected` [tokens, V], `found` as an output has them."""
    assert len(found) == len(expected)
    for row, scores in zip(expected, found, strict=True):
        for token, entry in scores.items():
            assert abs(row[token] - entry.logprob) <= min(tolerances.LOGPROB, 1e-3)
