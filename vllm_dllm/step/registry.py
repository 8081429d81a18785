"""What only some requests ask for: kept by slot, so that the others cost nothing."""

from dataclasses import dataclass
from typing import Protocol

from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.options import RequestOptions


@dataclass(frozen=True)
class NewRequest:
    """A request that came to the worker, or came back after a preemption."""

    slot: int
    params: SamplingParams
    options: RequestOptions
    prompt_len: int  # tokens
    prefill_len: int  # tokens; after a preemption with the blocks committed so far
    num_steps: int  # denoise steps that a canvas may take

    @property
    def is_resumed(self) -> bool:
        return self.prefill_len > self.prompt_len


class Registry(Protocol):
    """How `CanvasStep` speaks to each of them; what a step asks of one is its own matter."""

    def add_request(self, request: NewRequest) -> None:
        """The slot has been dropped before. What the device must know may wait for
        `apply_staged_writes`."""

    def apply_staged_writes(self) -> None:
        """The tokens of the requests added since the last step are on the device."""

    def remove_request(self, slot: int) -> None:
        """Forgets the slot's request, if it asked for anything."""
