"""What the engine's process counts between two messages to an API process."""

from collections import Counter
from dataclasses import dataclass, field

CAUSES = ("converged", "revealed", "step_cap")
COMMITS = ("shared", "own", "none")
ACCEPTANCES = ("entropy_bound", "confidence", "top_k", "in_order")


@dataclass
class CanvasCounts:
    """Each field is a metric of `prometheus.py`, which says what it counts."""

    forwards: int = 0
    denoise_steps: int = 0
    accepted_positions: int = 0
    canvases_cut: int = 0
    # As the last step says; 0: there was none
    sampling_memory_peak_bytes: int = 0
    sampling_memory_bound_bytes: int = 0
    canvases_finished: Counter[str] = field(default_factory=Counter)  # by cause
    commits: Counter[str] = field(default_factory=Counter)  # by forward
    requests: Counter[str] = field(default_factory=Counter)  # by acceptance
    block_denoise_steps: list[int] = field(default_factory=list)
    block_entropy_nats: list[float] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)
