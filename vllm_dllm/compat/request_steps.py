"""The steps of one request, carried to the API server as vLLM's counts of its drafts are."""

from typing import Any, NamedTuple

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request


class Steps(NamedTuple):
    denoise_steps: int
    forwards: int  # of its canvases; those of its prompt are not counted


class RequestSteps(RequestSpecDecodeMetrics):
    """Has entry 0 of `histogram` for denoise steps, since a step may denoise a canvas and commit
    it, and an entry of the two lists for each forward."""

    def denoised(self) -> None:
        self.histogram[0] += 1

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        self.num_draft_tokens += num_draft_tokens
        self.per_step_drafted.append(num_draft_tokens)
        self.per_step_accepted.append(num_accepted)
        if num_accepted > 0:
            self.histogram[num_accepted] += 1


def count_steps(request: Request, most_tokens: int) -> None:
    """Counts the steps of a request from now on. `most_tokens`: of a canvas."""
    request.spec_decode_metrics = RequestSteps.new(most_tokens)


def denoised(request: Request) -> None:
    """A step has denoised the request's canvas."""
    if isinstance(request.spec_decode_metrics, RequestSteps):
        request.spec_decode_metrics.denoised()


def take_steps(output: Any) -> Steps | None:
    """Returns the steps of a finished answer, and None for one that goes on. They are taken out,
    since vLLM would show them as drafts."""
    counts, output.spec_decode_metrics = output.spec_decode_metrics, None
    return None if counts is None else Steps(counts.histogram[0], len(counts.per_step_drafted))
