"""What a request is told of its prompt is of its own prompt, whoever had its slot before."""

from collections.abc import Iterator

import pytest
from vllm import LLM, RequestOutput, SamplingParams

from tests.engine.drafters import drafting, started

pytestmark = pytest.mark.slow

SECRET = [300 + i for i in range(40)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with started(drafting(max_num_seqs=2)) as it:
        yield it


def ask_in_a_used_slot(llm: LLM, prompt: list[int]) -> RequestOutput:
    """`prompt`, scored, beside a long request and in the slot of one that has ended."""
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [[9, 8, 7], SECRET, prompt]
    return llm.generate(prompts, [long, short, scored], use_tqdm=False)[-1]


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5] * 17], ids=len)
def test_a_prompt_is_scored_to_its_end_and_no_further(llm: LLM, prompt: list[int]) -> None:
    found = ask_in_a_used_slot(llm, prompt).prompt_logprobs
    assert found is not None and found[0] is None
    assert [list(scores) for scores in found[1:]] == [[token] for token in prompt[1:]]


def test_a_slot_keeps_no_prompt(llm: LLM) -> None:
    ask_in_a_used_slot(llm, [5])
    worker = llm.llm_engine.model_executor.driver_worker
    tokens = worker.model_runner.req_states.all_token_ids.gpu
    assert not set(tokens.flatten().tolist()) & set(SECRET)
