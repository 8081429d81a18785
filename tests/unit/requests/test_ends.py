"""The device foresees exactly the stops that vLLM's scheduler decides on."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.utils import check_stop

from vllm_dllm.requests.ends import MAX_FORESEEN_STOPS, NEVER, foreseen_stop_tokens, is_last_block

VOCABULARY, WIDTH, MAX_MODEL_LEN = 12, 6, 40


def vllm_stops(prompt_len: int, generated: int, block: list[int], params: SamplingParams) -> bool:
    """Runs vLLM's own check after each token of the block, as its scheduler does."""
    request = SimpleNamespace(
        pooling_params=None,
        sampling_params=params,
        max_tokens=params.max_tokens,
        output_token_ids=[],
        num_output_tokens=generated,
        num_tokens=prompt_len + generated,
        status=None,
        stop_reason=None,
    )
    for token in block:
        request.output_token_ids.append(token)
        request.num_output_tokens += 1
        request.num_tokens += 1
        if check_stop(request, MAX_MODEL_LEN):
            return True
    return False


def test_agrees_with_the_scheduler() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    cases, expected = [], []
    for _ in range(300):
        params = SamplingParams(
            max_tokens=draw(1, 30),
            stop_token_ids=[draw(0, VOCABULARY) for _ in range(draw(0, 3))],
        )
        params._eos_token_id = draw(0, VOCABULARY) if draw(0, 2) else None
        prompt_len, generated, length = draw(1, 20), WIDTH * draw(0, 3), draw(1, WIDTH + 1)
        if generated >= params.max_tokens or prompt_len + generated + length > MAX_MODEL_LEN:
            continue  # such a request has stopped before
        block = torch.randint(VOCABULARY, (WIDTH,), generator=generator)
        end = min(prompt_len + params.max_tokens, MAX_MODEL_LEN)
        stops = foreseen_stop_tokens(params)
        stops += [NEVER] * (3 - len(stops))
        cases.append((block, length, prompt_len + generated + length, end, stops))
        expected.append(vllm_stops(prompt_len, generated, block[:length].tolist(), params))
    blocks, lengths, block_ends, ends, stops = zip(*cases, strict=True)
    found = is_last_block(
        torch.stack(blocks),
        torch.arange(WIDTH) < torch.tensor(lengths)[:, None],
        torch.tensor(block_ends),
        torch.tensor(ends),
        torch.tensor(stops),
    )
    assert found.tolist() == expected
    assert 50 < sum(expected) < len(expected) - 50


@pytest.mark.parametrize("count", [MAX_FORESEEN_STOPS, MAX_FORESEEN_STOPS + 1])
def test_a_request_with_too_many_stop_tokens_is_not_foreseen_to_stop(count: int) -> None:
    tokens = foreseen_stop_tokens(SamplingParams(stop_token_ids=list(range(count))))
    assert tokens == (list(range(count)) if count <= MAX_FORESEEN_STOPS else [])
