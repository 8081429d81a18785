"""Blocks of masked models that are denoised together: as the same loop in plain Python does it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests import tolerances
from tests.engine.blocks_in_flight import fly
from tests.engine.conftest import Engine, GetEngine
from tests.engine.masked import Rule
from tests.engine.masked_requests import GetMade, generate, params_of, prompts_of
from tests.engine.test_masked import blocks_decided_alike

pytestmark = pytest.mark.numerics

IN_FLIGHT = 3
SURE = Rule("dynamic", threshold=0.4, temperature=0.2)  # at which random weights are sure enough
RULES = {
    "SDAR": [SURE, Rule("dynamic", threshold=0.2)],
    "LLaDA2": [SURE._replace(edit=0.6, most_edit_steps=3)],
}


@pytest.fixture(scope="module")
def in_flight(engine: GetEngine) -> GetEngine:
    def start(checkpoint: Path, **options: Any) -> Engine:
        return engine(checkpoint, {"blocks_in_flight": IN_FLIGHT}, **options)

    return start


@pytest.mark.parametrize(("family", "num_prompts"), [("SDAR", 20), ("LLaDA2", 10)])
def test_decisions(
    in_flight: GetEngine, made: GetMade, is_ahead: bool, family: str, num_prompts: int
) -> None:
    """Prompts that end anywhere in a canvas, in parts, beside each other; with and without a
    temperature, a stop token, few tokens to come, and fewer blocks than the server's."""
    (checkpoint, decode), rules = made(family, 4), RULES[family]
    prompts = (prompts_of(4) * num_prompts)[:num_prompts]
    params, asked = [], []
    for seed, prompt in enumerate(prompts):
        rule, max_tokens, stop = rules[seed % len(rules)], (120, 7, 61)[seed % 3], None
        most = (None, None, 2, 1)[seed % 4]
        if seed % 2:
            stop = fly(decode, IN_FLIGHT, prompt, 7, rule, seed).trajectory.tokens[5]
        params.append(params_of(rule, max_tokens, seed))
        if stop is not None:
            params[-1].stop_token_ids = [stop]
        if most is not None:
            params[-1].extra_args["diffusion_blocks_in_flight"] = most
        asked.append((prompt, max_tokens, rule, seed, stop, most))
    model = in_flight(
        checkpoint, block_size=32, max_num_batched_tokens=64, async_scheduling=is_ahead
    )
    found = generate(model, prompts, params)
    same = total = num_ahead = num_stopped = 0
    for ours, one in zip(found, asked, strict=True):
        flight = fly(decode, IN_FLIGHT, *one)
        num_ahead += flight.num_ahead
        num_stopped += ours.tokens[-1] == one[4]
        theirs = partial(lambda one: fly(decode, IN_FLIGHT, *one).trajectory, one)
        ours.steps = ours.steps[: len(flight.trajectory.steps)]  # others were on their way
        same += blocks_decided_alike(ours, theirs, decode)
        total += sum(step.finished for step in ours.steps)
    print(f"{same} of {total}, {num_ahead} tokens ahead, {num_stopped} stopped")
    assert same >= total * tolerances.DECIDED and IN_FLIGHT * total >= 6 * num_prompts
    assert num_ahead > 5 * num_prompts and num_stopped > num_prompts / 4


def test_answers_keep_their_form(in_flight: GetEngine, made: GetMade) -> None:
    form = "[a-z]{3}( [a-z]{2})*"
    params = [
        params_of(SURE, 10 + 7 * seed, seed, structured_outputs=StructuredOutputsParams(regex=form))
        for seed in range(5)
    ]
    model = in_flight(made("SDAR", 4).checkpoint, block_size=32)
    for one in params:
        one.ignore_eos = False
    tokenizer = model.llm.get_tokenizer()
    for output in model.ask(prompts_of(4), params):
        text = tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert re.fullmatch(form, text), text
