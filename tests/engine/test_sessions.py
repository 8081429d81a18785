"""Streamed inputs: each is answered with the whole answer to the one before in its context."""

import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.engine.conftest import HELD_OUT, TRAINED, Engine, GetEngine, chat_tokens
from tests.engine.rounding import assert_same, decided
from tests.paths import CHECKPOINTS

pytestmark = pytest.mark.numerics

SDAR = CHECKPOINTS / "sdar-tiny"


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    chats = HELD_OUT[::37]
    tokenizer = engine.llm.get_tokenizer()
    return [chat_tokens(tokenizer, chat["messages"]) for chat in chats[:count]]


def session(engine: Engine, inputs: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """The answers, one to each input."""
    llm, answers, name = engine.llm.llm_engine, [], f"session {uuid.uuid4()}"
    for tokens in inputs:
        prompt = {"prompt_token_ids": list(tokens)}
        request = llm.input_processor.process_inputs(
            name, prompt, params, ("generate",), resumable=True
        )
        llm.engine_core.add_request(request)
        answers.append([])
        while True:
            outputs = llm.engine_core.get_output().outputs
            answers[-1] += [token for output in outputs for token in output.new_token_ids]
            if any(output.finish_reason is not None for output in outputs):
                break
    llm.engine_core.abort_requests([name])
    return answers


@pytest.mark.parametrize(
    ("checkpoint", "settings"),
    [
        pytest.param(TRAINED, {}, id="DiffusionGemma"),
        pytest.param(TRAINED, {"commit_last_block": True}, id="committed"),
        pytest.param(SDAR, {}, id="SDAR"),
    ],
)
def test_an_answer_is_context_of_the_next(
    engine: GetEngine, checkpoint: Path, is_ahead: bool, settings: dict[str, bool]
) -> None:
    """The shorter ones end in the prompt's last block, if the model has blocks."""
    served = engine(checkpoint, settings, async_scheduling=is_ahead)
    prompts = prompts_of(served, 12)
    pairs = list(zip(prompts[::2], prompts[1::2], strict=True))
    for max_tokens in (1, 22):
        params = SamplingParams(seed=0, max_tokens=max_tokens)

        def answer(tokens: list[int], params: SamplingParams = params) -> list[int]:
            (output,) = served.ask([tokens], params)
            return list(output.outputs[0].token_ids)

        expected = decided(
            served.llm,
            lambda: [answer([*first, *answer(first), *second]) for first, second in pairs],
        )
        assert_same([session(served, pair, params)[1] for pair in pairs], expected)
