"""The tokens that requests' rules name, copied to the device for all new requests at once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.step.slots import NewRequest


class RuleTokens(NamedTuple):
    """The tokens that one request's rules name, on the host."""

    allowed: list[int]  # empty: all
    never: list[int]  # bad words of one token
    biased: list[int]  # each once
    biases: list[float]  # of `biased`
    early_stops: list[int]  # stop tokens that may not come before `min_tokens` others

    @classmethod
    def from_request(cls, request: NewRequest, vocab_size: int) -> "RuleTokens":
        """Returns the tokens that a request's parameters name."""
        params = request.params
        allowed = params.allowed_token_ids
        if request.options.constrained:
            allowed = params.logprob_token_ids
        bias = params.logit_bias or {}
        words = params.bad_words_token_ids or []
        # A tokenizer or a generation_config may name tokens that the model does not have.
        stops = [stop for stop in sorted(params.all_stop_token_ids) if 0 <= stop < vocab_size]
        # A grammar's walk knows where an answer can go on (`GrammarState.min_tokens`).
        has_early_stops = params.min_tokens > 0 and params.structured_outputs is None
        return cls(
            allowed=list(allowed or ()),
            never=[word[0] for word in words if len(word) == 1 and 0 <= word[0] < vocab_size],
            biased=list(bias),
            biases=list(bias.values()),
            early_stops=stops if has_early_stops else [],
        )

    def __bool__(self) -> bool:
        """Returns whether any token is named."""
        return any(self)

    def to_arrays(self) -> list[np.ndarray]:
        """Returns an array [k] int64 for each field, in the order that `copy_to_device` reads. The
        array of biases holds the bits of float64 numbers."""
        tokens = (self.allowed, self.never, self.biased, self.early_stops)
        biases = np.array(self.biases, dtype=np.float64).view(np.int64)
        return [*(np.array(each, dtype=np.int64) for each in tokens), biases]


class DeviceRuleTokens(NamedTuple):
    """The tokens that one request's rules name, on the device: [k] int64 but for `biases`."""

    allowed: torch.Tensor
    never: torch.Tensor
    biased: torch.Tensor
    early_stops: torch.Tensor
    biases: torch.Tensor  # [k] fp32

    def make_bias(self, vocab_size: int) -> torch.Tensor | None:
        """Returns `LogitRules.bias`, [V] fp32. Returns None if no token is biased."""
        if not len(self.biased):
            return None
        bias = torch.zeros(vocab_size, device=self.biases.device)
        return bias.index_copy_(0, self.biased, self.biases)

    def make_excluded(self, vocab_size: int) -> torch.Tensor | None:
        """Returns `LogitRules.excluded`, [V] bool. Returns None if no token is excluded."""
        if not (len(self.allowed) or len(self.never)):
            return None
        excludes_others, device = len(self.allowed) > 0, self.allowed.device
        excluded = torch.full((vocab_size,), excludes_others, dtype=torch.bool, device=device)
        return excluded.index_fill_(0, self.allowed, False).index_fill_(0, self.never, True)


def copy_to_device(
    device: torch.device, requests: Sequence[RuleTokens]
) -> Iterator[DeviceRuleTokens]:
    """Yields the tokens of each request on the device, copied for all requests at once, without
    waiting. `requests` is not empty."""
    arrays = [tokens.to_arrays() for tokens in requests]
    flat = [array for of_request in arrays for array in of_request]
    copied = async_tensor_h2d(np.concatenate(flat), device=device)
    parts = iter(copied.split([len(array) for array in flat]))
    for of_request in arrays:
        allowed, never, biased, early_stops, biases = (next(parts) for _ in of_request)
        numbers = biases.view(torch.float64).float()
        yield DeviceRuleTokens(allowed, never, biased, early_stops, numbers)
