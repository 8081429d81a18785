"""vLLM's warm-up, with other requests than its own.

Its requests ask for everything at once, so that a sampler which computes less for those who ask for
less has kernels that are not compiled yet when it is over.
"""

from collections.abc import Callable, Iterable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.warmup import warmup_kernels


def warm_up(
    runner: Any,
    execute_model: Callable[[Any], Any],
    sample_tokens: Callable[[Any], Any],
    kinds: Iterable[SamplingParams],
) -> None:
    """Steps of requests of each kind: of many, of two and of one."""
    stock = SamplingParams.for_sampler_warmup
    try:
        for params in kinds:
            SamplingParams.for_sampler_warmup = staticmethod(lambda params=params: params)
            warmup_kernels(runner, execute_model, sample_tokens)
    finally:
        SamplingParams.for_sampler_warmup = staticmethod(stock)
