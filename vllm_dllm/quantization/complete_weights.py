"""Checks that a checkpoint has every tensor that a model needs.

vLLM counts joined layers (q, k and v, gate and up, a layer's experts) as loaded after the first
part, and linear layers and embeddings as loaded in any case. Here a missing tensor is an error, so
that no half-loaded model is served.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.models.utils import WeightsMapper

_MOST_NAMED = 8  # missing tensors that an error names
_SAVED = {"weight", "weight_packed", "weight_scale", "bias"}
"""Kinds of tensors that checkpoints hold of a layer that may be quantised. Other parameters of such
a layer are not required, since they may have been made for a kernel. But a kind that one part of a
joined layer has, all its parts must have."""


_come_in_parts: ContextVar[bool] = ContextVar("weights come in parts", default=False)


@contextmanager
def weights_in_parts() -> Iterator[None]:
    """Lets `load_weights` of our models take less than a checkpoint, as long as the context is
    open: a trainer sends weights one by one, or a buffer at a time."""
    token = _come_in_parts.set(True)
    try:
        yield
    finally:
        _come_in_parts.reset(token)


def must_be_complete() -> bool:
    """Returns whether weights that are missing are an error."""
    return not _come_in_parts.get()


class CompleteWeights:
    """Counts a checkpoint's weights, and knows which are still missing."""

    def __init__(
        self,
        model: nn.Module,
        packed_modules: Mapping[str, list[str]],
        mapper: WeightsMapper,  # from the checkpoint's names to those of `model`
        optional: tuple[str, ...] = (),  # beginnings of names that may be missing
    ) -> None:
        """Notes what must come. `packed_modules`: the model's joined layers, by the last part of
        their names -> the checkpoint's layers that each joins."""
        self._joined_layers = dict(_joined_layers(model, packed_modules))
        self._required_parameters = [
            name for name in _required_parameters(model) if not name.startswith(optional)
        ]
        self._mapper = mapper
        self._found: dict[str, set[str]] = defaultdict(set)  # layer -> its tensors
        self.position = "before the first weight"
        """How far `count` has come, in words for an error."""

    def count(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all weights under the checkpoint's names, and records that they have come."""
        for name, weight in weights:
            self.position = f"at {name} of shape {list(weight.shape)}"
            layer, _, kind = (self._mapper.map_name(name) or "").rpartition(".")
            self._found[layer].add(kind)
            yield name, weight
            self.position = f"after {name}"

    def check_complete(self, loaded: Iterable[str] = ()) -> None:
        """Raises ValueError, with their names in the checkpoint, if tensors are missing. `loaded`:
        parameters that were loaded from tensors of other names."""
        if not must_be_complete():
            return
        known = set(loaded)
        missing = [
            f"{layer}.{kind}"
            for group in self._joined_layers.values()
            for kind in sorted(set[str]().union(*(self._found.get(layer, ()) for layer in group)))
            for layer in group
            if kind not in self._found.get(layer, ())
        ]
        for name in self._required_parameters:
            module, _, kind = name.rpartition(".")
            layers = self._joined_layers.get(module, (module,))
            kind = kind.removeprefix("w13_").removeprefix("w2_")
            if name not in known and not any(kind in self._found.get(each, ()) for each in layers):
                missing += [f"{each}.{kind}" for each in layers]
        if missing:
            complaint = describe_missing(list(dict.fromkeys(missing)), self._mapper)
            raise ValueError(
                f"Cannot load the checkpoint: {complaint}. Check that its files are complete and "
                f"belong together."
            )


def describe_missing(names: Sequence[str], mapper: WeightsMapper) -> str:
    """Returns what to say of tensors that a checkpoint lacks, with its names for them. `names`: the
    model's, to which `mapper` renames the checkpoint's."""
    first = ", ".join(name_in_checkpoint(name, mapper) for name in names[:_MOST_NAMED])
    rest = len(names) - _MOST_NAMED
    return f"no weights for {first}" + (f" and {rest} more" if rest > 0 else "")


def name_in_checkpoint(name: str, mapper: WeightsMapper) -> str:
    """Returns the name that `mapper` renames to `name`, a tensor of the model."""
    for old, new in mapper.orig_to_new_prefix.items():
        if new is not None and name.startswith(new):
            return old + name.removeprefix(new)
    return name


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of `model` by the names that they have without LoRA, which wraps layers
    once they are loaded. A server that has slept loads them again."""
    for name, module in model.named_modules():
        yield name.replace(".base_layer", ""), module


def _required_parameters(model: nn.Module) -> Iterator[str]:
    """Yields the names of parameters that a checkpoint must hold. Of parameters that are tied, it
    yields only the first."""
    seen = set[int]()
    for name, module in _named_modules(model):
        method = getattr(module, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod):
            continue
        # Weights that are quantised while they are loaded need no scales.
        saved = {"weight", "bias"} if getattr(method, "uses_meta_device", False) else _SAVED
        is_plain = method is None or isinstance(method, UnquantizedLinearMethod)
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if is_plain or kind.removeprefix("w13_").removeprefix("w2_") in saved:
                yield f"{name}.{kind}"


def _joined_layers(
    model: nn.Module, packed_modules: Mapping[str, list[str]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the name of each layer of `model` that joins several of the checkpoint's layers, and
    the names of these. Experts of other ranks are left out."""
    for name, module in _named_modules(model):
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, RoutedExperts):
            experts, is_here = name.removesuffix(".routed_experts"), module.expert_map
            yield (
                name,
                tuple(
                    f"{experts}.{expert}.{part}"
                    for expert in range(module.moe_config.num_experts)
                    if is_here is None or is_here[expert] >= 0
                    for part in ("gate_proj", "up_proj", "down_proj")
                ),
            )
        elif isinstance(module, LinearBase) and len(packed_modules.get(leaf, ())) > 1:
            yield name, tuple(f"{parent}.{part}" for part in packed_modules[leaf])
