"""Limits the share of a step that one HTTP request takes.

The answers of one HTTP request (`n`, several prompts, conversations, items or questions) are
requests of their own to the scheduler. While other HTTP requests run, only its oldest answers take
part in a step; the others keep their places and wait for these to end. Its answers never take all
places, so that there is one for the next request that comes.

A client that sends one request after another is still there between two of them. If each gap were
filled with a step of all answers, its next request would wait for that step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.request import Request

from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests.options import load_option

_CANVASES_ON_CPUS = 2  # the default of `FairShare.canvases` on CPUs
REMEMBERED_STEPS = 32
"""For this many steps after another HTTP request was last there, one takes only its share."""


class FairShare:
    """Chooses the requests that leave a step to other HTTP requests."""

    def __init__(self, canvases: int, places: int) -> None:
        """`canvases`: most canvases of one HTTP request in a step that others share. `places`: most
        requests of one HTTP request that run at a time."""
        self.canvases, self.places = canvases, places
        self._steps_alone = REMEMBERED_STEPS

    @classmethod
    def from_config(cls, config: VllmConfig, limits: RequestLimits) -> "FairShare":
        """Returns the limits that are set, or defaults for this device and `--max-num-seqs`."""
        most = config.scheduler_config.max_num_seqs
        default = _CANVASES_ON_CPUS if current_platform.is_cpu() else max(1, most // 4)
        canvases = limits.canvases or default
        return cls(canvases, max(canvases, most // 2))

    def sitting_out(self, running: Sequence[Request], waiting: Iterable[Request]) -> list[Request]:
        """Returns running requests that leave the next step to others. Called once a step, before
        `held_back`: it counts the steps since others were last there."""
        names = _http_requests(running)
        is_shared = len({*names, *_http_requests(waiting)}) > 1
        self._steps_alone = 0 if is_shared else self._steps_alone + 1
        return _over_limit(self.canvases, running, names, Counter()) if self._is_shared else []

    def held_back(self, running: Iterable[Request], waiting: Iterable[Request]) -> list[Request]:
        """Returns waiting requests that must not start next. Called after `sitting_out`."""
        counts, waiting = Counter(_http_requests(running)), list(waiting)
        most = self.canvases if self._is_shared else self.places
        return _over_limit(most, waiting, _http_requests(waiting), counts)

    @property
    def _is_shared(self) -> bool:
        """Returns whether other HTTP requests share the step that is about to be scheduled, or did
        in the last `REMEMBERED_STEPS` steps and may come back any moment."""
        return self._steps_alone < REMEMBERED_STEPS


def _http_requests(requests: Iterable[Request]) -> list[str]:
    """Returns the name of the HTTP request that each request is part of. Offline each is one."""
    return [
        load_option(request.sampling_params, "http_request") or request.request_id
        for request in requests
    ]


def _over_limit(
    most: int, requests: Sequence[Request], names: Sequence[str], counts: Counter[str]
) -> list[Request]:
    """Returns the requests that come after the first `most` of their HTTP request. `names`: the
    HTTP request of each. `counts`: how many come before, by HTTP request; changed in place."""
    excess = []
    for request, name in zip(requests, names, strict=True):
        counts[name] += 1
        if counts[name] > most:
            excess.append(request)
    return excess
