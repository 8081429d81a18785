"""How the rows of vLLM's BailingMoeV2 choose their experts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from vllm_dllm.compat.patching import replaced


@contextmanager
def chosen_by(choose: Callable[..., Any]) -> Iterator[None]:
    """Layers that are made meanwhile choose by vLLM's `custom_routing_function`: this one, which
    gets the layer's `bias`, too."""

    def make(stock: Any) -> Any:
        def made(*, e_score_correction_bias: torch.Tensor, **options: Any) -> Any:
            own = {
                "custom_routing_function": partial(choose, bias=e_score_correction_bias),
                "use_grouped_topk": False,
                "num_expert_group": None,
                "topk_group": None,
            }
            return stock(**options | own)

        return made

    with replaced("model_executor.models.bailing_moe:FusedMoEFactory", make):
        yield
