"""Expert parallelism on CPUs: vLLM's kernel of experts that are not quantised takes no notice of
where an expert is. It was given numbers of experts of all ranks, and the first request ended the
worker."""

import inspect
from functools import wraps
from typing import Any


def leave_other_ranks_experts_out() -> None:
    """A rank computes its own experts; those of others count nothing there. Repeatable."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply
    if hasattr(apply, "__wrapped__"):
        return
    signature = inspect.signature(apply)

    @wraps(apply)
    def apply_own(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        of_call = call.arguments
        if (expert_map := of_call["expert_map"]) is not None:
            own = expert_map[of_call["topk_ids"].long()]  # [T, k], -1 for those of other ranks
            of_call["topk_weights"] = of_call["topk_weights"].masked_fill(own < 0, 0.0)
            of_call["topk_ids"] = own.clamp(min=0).to(of_call["topk_ids"].dtype)
            of_call["expert_map"] = None
        apply(*call.args, **call.kwargs)

    CPUUnquantizedExperts.apply = apply_own
