"""Tensors of a checkpoint that vLLM joins into one: q, k and v, gate and up, a layer's experts.

vLLM counts what it joined as loaded after the first part. Here a part without the others is an
error, so that no half-loaded model is served.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import WeightsMapper

_MOST_NAMED = 8


class JoinedWeights:
    """Passes on a checkpoint's weights, and knows which parts are still missing."""

    def __init__(
        self,
        model: nn.Module,
        packed_modules: Mapping[str, list[str]],
        mapper: WeightsMapper,  # from the checkpoint's names to those of `model`
    ) -> None:
        self._groups = list(_groups(model, packed_modules))
        self._mapper = mapper
        self._found: dict[str, set[str]] = defaultdict(set)  # layer -> its tensors

    def read(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, by the model's names."""
        for name, weight in self._mapper.apply(weights):
            layer, _, kind = name.rpartition(".")
            self._found[layer].add(kind)
            yield name, weight

    def check_complete(self) -> None:
        """Raises ValueError if parts are missing, with their names in the checkpoint."""
        missing = [
            self._in_checkpoint(f"{layer}.{kind}")
            for group in self._groups
            for kind in sorted(set[str]().union(*(self._found.get(layer, ()) for layer in group)))
            for layer in group
            if kind not in self._found.get(layer, ())
        ]
        if missing:
            rest = len(missing) - _MOST_NAMED
            more = f" and {rest} more" if rest > 0 else ""
            raise ValueError(
                f"Cannot load the checkpoint: no weights for {', '.join(missing[:_MOST_NAMED])}"
                f"{more}. Check that its files are complete and belong together."
            )

    def _in_checkpoint(self, name: str) -> str:
        for old, new in self._mapper.orig_to_new_prefix.items():
            if new is not None and name.startswith(new):
                return old + name.removeprefix(new)
        return name


def _groups(model: nn.Module, packed_modules: Mapping[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """Names of the layers that are one in `model`."""
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, RoutedExperts):
            experts, is_here = name.removesuffix(".routed_experts"), module.expert_map
            yield tuple(
                f"{experts}.{expert}.{part}"
                for expert in range(module.moe_config.num_experts)
                if is_here is None or is_here[expert] >= 0
                for part in ("gate_proj", "up_proj", "down_proj")
            )
        elif isinstance(module, LinearBase) and len(packed_modules.get(leaf, ())) > 1:
            yield tuple(f"{parent}.{part}" for part in packed_modules[leaf])
