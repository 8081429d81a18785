"""A prompt's log-probabilities, held back until the request's first block.

vLLM expects them with the first tokens, which other models sample in the prompt's last step.
"""

from collections.abc import Container
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput


class HeldPromptScores:
    def __init__(self) -> None:
        self._by_request: dict[str, tuple[Any, Any]] = {}

    def hold(self, output: ModelRunnerOutput, requests: Container[str]) -> None:
        """Takes the scores out of a step's output, and puts those of requests into it that get
        their first tokens with it. `requests`: those that are not over."""
        scores = (output.prompt_logprobs_dict, output.prompt_token_id_logprobs_dict)
        for request_id in {*scores[0], *scores[1]}:
            self._by_request[request_id] = tuple(s.pop(request_id, None) for s in scores)
        for request_id in list(self._by_request):
            index = output.req_id_to_index.get(request_id)
            if index is not None and output.sampled_token_ids[index]:
                held = self._by_request.pop(request_id)
                for by_request, of_request in zip(scores, held, strict=True):
                    if of_request is not None:
                        by_request[request_id] = of_request
            elif request_id not in requests:  # aborted
                del self._by_request[request_id]
