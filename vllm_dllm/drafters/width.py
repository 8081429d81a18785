"""How many of a request's drafts the target verifies: one class a policy.

A policy is asked for a width before each draft and told what became of it. Widths count drafts; 0
means that the request is served without them.
"""

from vllm_dllm.drafters.config import DrafterConfig


class WidthPolicy:
    """Always the widest; the others' base."""

    def __init__(self, widest: int) -> None:
        self.widest = widest

    def width(self, request_id: str, num_requests: int) -> int:
        """For the next draft of a request in a batch of `num_requests`."""
        return self.widest

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """The target accepted `num_accepted` of `num_drafts` > 0."""

    def predicted(self, request_id: str, width: int) -> None:
        """A predictor has looked at the request's prefill."""

    def ended(self, request_id: str) -> None:
        """Nothing more will be asked about the request."""


class Predicted(WidthPolicy):
    """What the predictor says, once a request; the widest until it has."""

    def __init__(self, widest: int) -> None:
        super().__init__(widest)
        self._widths: dict[str, int] = {}

    def width(self, request_id: str, num_requests: int) -> int:
        return self._widths.get(request_id, self.widest)

    def predicted(self, request_id: str, width: int) -> None:
        # A request that is prefilled again after a preemption keeps its width.
        self._widths.setdefault(request_id, min(width, self.widest))

    def ended(self, request_id: str) -> None:
        self._widths.pop(request_id, None)


class ByAcceptance(WidthPolicy):
    """Narrower by a quarter, rounded up, while under `LOW` of a request's drafts are accepted,
    wider by as much over `HIGH`. The share is that of the last drafts, each counting half as much
    as the one after it."""

    LOW, HIGH = 0.6, 0.9

    def __init__(self, widest: int) -> None:
        super().__init__(widest)
        self._states: dict[str, tuple[int, float]] = {}  # width, accepted share

    def width(self, request_id: str, num_requests: int) -> int:
        return self._states.get(request_id, (self.widest, 1.0))[0]

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        last = num_accepted / num_drafts
        width, share = self._states.get(request_id, (self.widest, last))
        share = (share + last) / 2
        change = -(-width // 4)
        if share < self.LOW:
            width = max(width - change, 1)
        elif share > self.HIGH:
            width = min(width + change, self.widest)
        self._states[request_id] = width, share

    def ended(self, request_id: str) -> None:
        self._states.pop(request_id, None)


class ByLoad(WidthPolicy):
    """As many drafts as keep the step within `num_rows` tokens, shared evenly."""

    def __init__(self, widest: int, num_rows: int) -> None:
        super().__init__(widest)
        self.num_rows = num_rows

    def width(self, request_id: str, num_requests: int) -> int:
        return min(max(self.num_rows // num_requests - 1, 0), self.widest)


def make_policy(config: DrafterConfig, num_drafted: int) -> WidthPolicy:
    """The policy of `config` for a drafter of `num_drafted` tokens."""
    widest = config.widest(num_drafted)
    match config.width_policy:
        case "fixed":
            return WidthPolicy(widest)
        case "blockpilot":
            return Predicted(widest)
        case "acceptance":
            return ByAcceptance(widest)
        case "load":
            return ByLoad(widest, config.load_rows)
