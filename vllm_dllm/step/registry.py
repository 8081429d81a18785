"""How parts of a step learn of requests: each keeps what only some requests ask for, by slot."""

from dataclasses import dataclass
from typing import Protocol

from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.options import RequestOptions


@dataclass(frozen=True)
class NewRequest:
    """A request that is new to the worker, or comes back after a preemption."""

    slot: int
    params: SamplingParams
    options: RequestOptions
    prompt_len: int  # tokens
    prefill_len: int  # tokens; after a preemption with the blocks committed so far
    num_steps: int  # denoise steps that a canvas may take

    @property
    def is_resumed(self) -> bool:
        """Returns whether a preemption has interrupted its answer."""
        return self.prefill_len > self.prompt_len


class Registry(Protocol):
    """The methods that `StepRequests` calls on each part when requests come and leave."""

    def add_request(self, request: NewRequest) -> None:
        """Keeps what the request asks for. `remove_request` was called for the slot before. Copies
        to the device may be left to `apply_staged_writes`."""

    def apply_staged_writes(self) -> None:
        """Copies to the device what was added since the last step. Called when the runner has
        written the new requests' tokens."""

    def remove_request(self, slot: int) -> None:
        """Forgets what the slot's request asked for. Does nothing if it asked for nothing."""
