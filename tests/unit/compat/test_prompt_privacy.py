"""What a slot keeps of a request that left; `tests/engine/test_prompt_privacy.py` has scores."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_dllm.compat.logprobs import restrict_prompt_logprobs


def test_a_request_that_leaves_is_forgotten() -> None:
    heard: list[tuple[Any, ...]] = []
    stock = SimpleNamespace(
        add_request=lambda *args: heard.append(args),
        remove_request=lambda *args: heard.append(args),
        in_progress="vLLM's",
    )
    tokens = torch.full((3, 4), 7)
    runner: Any = SimpleNamespace(
        prompt_logprobs_worker=stock,
        req_states=SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens)),
    )
    restrict_prompt_logprobs(runner)
    scores = runner.prompt_logprobs_worker
    scores.add_request("a", 1, None)
    scores.add_request("b", 2, None)
    scores.remove_request("a")
    scores.remove_request("never came")
    assert tokens.tolist() == [[7] * 4, [0] * 4, [7] * 4]
    assert heard == [("a", 1, None), ("b", 2, None), ("a",), ("never came",)]
    assert scores.in_progress == "vLLM's"
