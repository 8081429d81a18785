"""What a request is told of its prompt is of its own prompt, whoever had its slot before."""

from collections.abc import Iterator

import pytest
from vllm import LLM, RequestOutput, SamplingParams

from tests.engines import in_this_process
from tests.paths import CHECKPOINTS

pytestmark = pytest.mark.slow

SECRET = [300 + i for i in range(40)]
DRAFTER = {
    "method": "dflash",
    "model": str(CHECKPOINTS / "qwen3-tiny-dflash"),
    "num_speculative_tokens": 15,
}


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with in_this_process():
        llm = LLM(
            str(CHECKPOINTS / "qwen3-tiny-target"),
            speculative_config=DRAFTER,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=2,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()


def ask_in_a_used_slot(llm: LLM, prompt: list[int]) -> RequestOutput:
    """`prompt`, scored, beside a long request and in the slot of one that has ended."""
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in ([9, 8, 7], SECRET, prompt)]
    return llm.generate(prompts, [long, short, scored], use_tqdm=False)[-1]


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5] * 17], ids=len)
def test_a_prompt_is_scored_to_its_end_and_no_further(drafting: LLM, prompt: list[int]) -> None:
    found = ask_in_a_used_slot(drafting, prompt).prompt_logprobs
    assert found is not None and found[0] is None
    assert [list(scores) for scores in found[1:]] == [[token] for token in prompt[1:]]


def test_a_slot_keeps_no_prompt(drafting: LLM) -> None:
    ask_in_a_used_slot(drafting, [5])
    (worker,) = [drafting.llm_engine.engine_core.engine_core.model_executor.driver_worker]
    tokens = worker.model_runner.req_states.all_token_ids.gpu
    assert not set(tokens.flatten().tolist()) & set(SECRET)
