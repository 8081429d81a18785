"""Reasoning comes before an answer that has a form: free, and ended in time for the answer."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.engine.conftest import Engine, GetEngine
from tests.engine.one_step import random_ids
from tests.unit.grammar.canvases import EOS, SCHEMAS, THOUGHT_ENDS, add_tokens

ORDER = SCHEMAS["order"]
C = 32
SIZE = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights: it thinks of nothing, and never by itself to the end."""
    path = tmp_path_factory.mktemp("reasoning")
    return add_tokens(make_tiny_checkpoint(path, canvas_length=C))


@pytest.fixture
def thinking(checkpoint: Path, engine: GetEngine) -> Engine:
    return engine(checkpoint, reasoning_parser="deepseek_r1", **SIZE)


def ask(served: Engine, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=3 * C,
            seed=i,
            structured_outputs=StructuredOutputsParams(json=ORDER),
            extra_args={"diffusion_max_steps": 2},
            **options,
        )
        for i in range(len(prompts))
    ]
    return served.ask(prompts, params)


def check(served: Engine, output: RequestOutput) -> int:
    """That there is one answer and that it fits. Returns the tokens of the reasoning."""
    tokens = list(output.outputs[0].token_ids)
    # Blocks that vLLM's own grammar rejects end with an error.
    assert output.outputs[0].finish_reason in ("stop", "length")
    thought = tokens.index(THOUGHT_ENDS) if THOUGHT_ENDS in tokens else -1
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    answer = served.llm.get_tokenizer().decode(tokens[thought + 1 : end])
    jsonschema.validate(json.loads(answer), ORDER)
    return thought + 1


PROMPTS = [random_ids(9 + i, 490, i) for i in range(6)]


def test_the_answer_comes_behind_the_reasoning(thinking: Engine) -> None:
    outputs = ask(thinking, PROMPTS)
    lengths = [check(thinking, output) for output in outputs]
    # Some end amid a canvas that is not their first.
    assert all(lengths) and any(length > C and length % C for length in lengths)
    alone = ask(thinking, PROMPTS[:1])[0]
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_a_prompt_that_has_ended_it(thinking: Engine) -> None:
    (output,) = ask(thinking, [[*PROMPTS[0], THOUGHT_ENDS]])
    assert check(thinking, output) == 0


def test_min_tokens_count_both(thinking: Engine) -> None:
    for output in ask(thinking, PROMPTS[:2], min_tokens=40):
        assert check(thinking, output) > 0


def test_no_stop_token_ends_it(thinking: Engine) -> None:
    """Nor beside `ignore_eos`, which leaves the request its own ones."""
    stops = list(range(100, 490, 9))
    for ignore_eos in (False, True):
        for output in ask(thinking, PROMPTS, stop_token_ids=stops, ignore_eos=ignore_eos):
            (answer,) = output.outputs
            assert answer.finish_reason in ("stop", "length")
            tokens = list(answer.token_ids)
            assert not set(stops) & set(tokens[: tokens.index(THOUGHT_ENDS)])


def test_asynchronous(checkpoint: Path, engine: GetEngine, asynchronous: None) -> None:
    served = engine(checkpoint, reasoning_parser="deepseek_r1", async_scheduling=True, **SIZE)
    assert all(check(served, output) for output in ask(served, PROMPTS))


def test_a_form_of_all_that_is_said(checkpoint: Path, engine: GetEngine) -> None:
    """vLLM's `enable_in_reasoning`."""
    config = {"reasoning_parser": "deepseek_r1", "enable_in_reasoning": True}
    served = engine(checkpoint, structured_outputs_config=config, **SIZE)
    assert [check(served, output) for output in ask(served, PROMPTS[:2])] == [0, 0]
