"""How vLLM's BailingMoeV2 routes tokens to experts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from vllm_dllm.compat.patching import temporarily_patch


@contextmanager
def use_routing_function(choose: Callable[..., Any]) -> Iterator[None]:
    """Makes layers that are built in this context route tokens by `choose`, which gets the
    arguments of vLLM's `custom_routing_function` and, as `bias`, the layer's bias."""

    def make_factory(stock: Any) -> Any:
        def make_experts(*, e_score_correction_bias: torch.Tensor, **options: Any) -> Any:
            options |= {
                "custom_routing_function": partial(choose, bias=e_score_correction_bias),
                "use_grouped_topk": False,
                "num_expert_group": None,
                "topk_group": None,
            }
            return stock(**options)

        return make_experts

    with temporarily_patch("model_executor.models.bailing_moe:FusedMoEFactory", make_factory):
        yield
