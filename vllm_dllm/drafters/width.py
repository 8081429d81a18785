"""Policies that choose how many tokens are drafted for a request, and verified by the target.

The scheduler asks the policy for a width before each draft, and tells it the outcome. A width
counts drafted tokens. A width of 0 serves the request without drafts.
"""

from dataclasses import dataclass, field

from vllm_dllm.config.drafter import DrafterConfig
from vllm_dllm.drafters.step_costs import Step, StepCosts


@dataclass
class WidthPolicy:
    """The policy `fixed`: always the widest draft. It is the base class of all policies; its hooks,
    which the scheduler calls, do nothing."""

    widest: int  # tokens of the widest draft

    def width(self, request_id: str, num_requests: int) -> int:
        """Returns the width of the next draft of a request, in a batch of `num_requests`."""
        return self.widest

    def step_scheduled(self, request_ids: list[str], num_requests: int) -> None:
        """Called when a step of `num_requests` requests is scheduled, before `width` is asked for
        the drafts after the step. `request_ids`: the requests for which tokens can be drafted."""

    def step_timed(self, step: Step, seconds: float) -> None:
        """Called when the step `step` has taken `seconds`."""

    def draft_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Called when the target has accepted `num_accepted` of `num_drafts` tokens, 1 or more."""

    def width_predicted(self, request_id: str, width: int) -> None:
        """Called when the predictor has chosen a width for a request."""

    def request_ended(self, request_id: str) -> None:
        """Called when a request has left the scheduler."""


@dataclass
class PredictedWidth(WidthPolicy):
    """The policy `blockpilot`: the width that the predictor chose for the request. Until the
    predictor has chosen, the width is the widest."""

    _widths: dict[str, int] = field(default_factory=dict)  # by request id

    def width(self, request_id: str, num_requests: int) -> int:
        return self._widths.get(request_id, self.widest)

    def width_predicted(self, request_id: str, width: int) -> None:
        """Keeps the first width that is predicted for a request."""
        # A request that is prefilled again after a preemption keeps its width.
        self._widths.setdefault(request_id, min(width, self.widest))

    def request_ended(self, request_id: str) -> None:
        self._widths.pop(request_id, None)


@dataclass
class _AcceptanceHistory:
    """A request's width, and averages of how many drafted tokens were accepted. In an average each
    draft counts half as much as the next one."""

    width: int
    num_accepted: float
    """Average number of accepted tokens of a draft."""
    share_accepted: float = 1.0
    """Average share of a draft's tokens that were accepted."""


class AcceptanceWidth(WidthPolicy):
    """The policy `acceptance`: drafts for the requests with which the batch yields the most tokens
    per second. It predicts that from how many of their drafts were accepted and how long steps
    took.

    A request's width shrinks by a quarter, rounded up, while under `LOW` of its drafts are
    accepted. It grows by as much while over `HIGH` are. A new request starts with the widest draft
    and the average acceptance of recent requests. Requests that are not drafted for are tried again
    every `TRY_EVERY` steps, and less often while nothing is drafted at all.
    """

    LOW, HIGH = 0.6, 0.9
    MEMORY = 0.8  # weight of the average over all requests against the next draft
    TRY_EVERY, TRY_LEAST = 64, 512  # shortest and longest pause between tries, in steps
    LEARN_EVERY, PLAIN_EVERY = 8, 256  # steps between steps without drafts, at first and later

    def __init__(self, widest: int) -> None:
        """Starts without a history: all requests are drafted for until costs of steps are known."""
        super().__init__(widest)
        self._histories: dict[str, _AcceptanceHistory] = {}
        self._num_accepted_of_all = float(widest)  # tokens of a draft, averaged over requests
        self._costs = StepCosts()
        self._chosen: set[str] = set()  # requests to draft for after the scheduled step
        # The last result of `_paying_requests`, and what it was computed for.
        self._paying_key: tuple[list[str], int, int] | None = None
        self._paying: set[str] = set()
        self._since_try = self._since_plain = 0  # steps
        self._pause = self.TRY_EVERY

    def step_scheduled(self, request_ids: list[str], num_requests: int) -> None:
        """Chooses requests for which tokens are drafted after the step; `width` is 0 for others."""
        self._since_try += 1
        self._since_plain += 1
        if not request_ids:
            return
        self._chosen = self._choose_requests(request_ids, num_requests)
        if not self._chosen:
            self._since_plain = 0

    def _choose_requests(self, request_ids: list[str], num_requests: int) -> set[str]:
        """Returns the requests to draft for: those that pay. Now and then returns none, to learn
        what a step without drafts costs, or all, to try the other requests again with the widest
        draft."""
        lacks_plain = self._costs.lacks_steps_without_drafts
        if self._since_plain >= (self.LEARN_EVERY if lacks_plain else self.PLAIN_EVERY):
            return set()
        paying = self._paying_requests(request_ids, num_requests)
        if paying:
            self._pause = self.TRY_EVERY
        if len(paying) < len(request_ids):
            if self._since_try < self._pause:
                return paying
            if not paying:
                self._pause = min(2 * self._pause, self.TRY_LEAST)
            for request_id in set(request_ids) - paying:
                self._history(request_id).width = self.widest
            self._paying_key = None
        self._since_try = 0
        return set(request_ids)

    def _paying_requests(self, request_ids: list[str], num_requests: int) -> set[str]:
        """Returns what `_find_paying_requests` returns. Computes it once for equal arguments, as
        long as no draft has been verified and no request has ended."""
        key = (request_ids, num_requests, self._costs.num_fits)
        if key != self._paying_key:
            self._paying_key = key
            self._paying = self._find_paying_requests(request_ids, num_requests)
        return self._paying

    def _find_paying_requests(self, request_ids: list[str], num_requests: int) -> set[str]:
        """Returns the requests with which a step yields the most tokens per second. Requests with
        more accepted tokens come first. Returns all while the costs of steps are unknown."""
        if not self._costs.are_known:
            return set(request_ids)
        histories = [(self._history(request_id), request_id) for request_id in request_ids]
        histories.sort(key=lambda pair: -pair[0].num_accepted)
        # Plain Python: caches are cold between steps, and loading numpy's code takes 0.4 ms.
        num_rows = num_tokens = float(num_requests)
        best_rate, num_best = num_tokens / self._costs.predict_seconds(num_rows, 0), 0
        for num_drafted, (history, _) in enumerate(histories, start=1):
            num_rows += history.width
            num_tokens += history.num_accepted
            rate = num_tokens / self._costs.predict_seconds(num_rows, num_drafted)
            if rate > best_rate:
                best_rate, num_best = rate, num_drafted
        return {request_id for _, request_id in histories[:num_best]}

    def step_timed(self, step: Step, seconds: float) -> None:
        self._costs.add_step(step, seconds)

    def _history(self, request_id: str) -> _AcceptanceHistory:
        """Returns a request's history, and begins one for a new request: with the widest draft and
        the average number of accepted tokens of all requests."""
        if request_id not in self._histories:
            self._histories[request_id] = _AcceptanceHistory(self.widest, self._num_accepted_of_all)
        return self._histories[request_id]

    def width(self, request_id: str, num_requests: int) -> int:
        """Returns the width of a request's next draft; 0 if the last step did not choose it."""
        return self._history(request_id).width if request_id in self._chosen else 0

    def draft_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Adds the draft to the request's history and the average. Adjusts the request's width."""
        change = num_accepted - self._num_accepted_of_all
        self._num_accepted_of_all += (1 - self.MEMORY) * change
        self._paying_key = None
        history = self._history(request_id)
        history.num_accepted = (history.num_accepted + num_accepted) / 2
        history.share_accepted = (history.share_accepted + num_accepted / num_drafts) / 2
        quarter = -(-history.width // 4)
        if history.share_accepted < self.LOW:
            history.width = max(history.width - quarter, 1)
        elif history.share_accepted > self.HIGH:
            history.width = min(history.width + quarter, self.widest)

    def request_ended(self, request_id: str) -> None:
        self._histories.pop(request_id, None)
        self._paying_key = None


@dataclass
class LoadWidth(WidthPolicy):
    """The policy `load`: as many drafts as keep a step within `num_rows` tokens, the same number
    for every request."""

    num_rows: int

    def width(self, request_id: str, num_requests: int) -> int:
        """Returns an equal share of `num_rows` without the target's token, at most the widest."""
        return min(max(self.num_rows // num_requests - 1, 0), self.widest)


def make_policy(config: DrafterConfig, num_drafted: int) -> WidthPolicy:
    """Returns the policy that the settings name, for a drafter of `num_drafted` tokens."""
    widest = config.max_width(num_drafted)
    match config.width_policy:
        case "fixed":
            return WidthPolicy(widest)
        case "blockpilot":
            return PredictedWidth(widest)
        case "acceptance":
            return AcceptanceWidth(widest)
        case "load":
            return LoadWidth(widest, config.load_rows)
