"""Says which tensors a checkpoint holds for a model, and what they must look like: vLLM's
parameters, of all ranks, taken apart into what each joins. Names have the prefixes that the model's
`hf_to_vllm_mapper` gives to the checkpoint's."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import PerTensorScaleParameter

_UNQUANTISED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_COMPRESSED = (CompressedTensorsLinearMethod, CompressedTensorsMoEMethod)
_CONVERTED = ({torch.bfloat16, torch.float16, torch.float32}, {torch.int32, torch.int64})
"""Types that are converted to each other when loaded."""
_SAVED = {
    *("weight", "bias"),
    *("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}
"""Kinds of tensors that checkpoints hold of a layer that may be quantised. Other parameters of such
a layer are not required, since they may have been made for a kernel."""


class TensorSpec(NamedTuple):
    """What a tensor of a checkpoint must look like."""

    parameter: str
    """Name of the model's parameter that it is, or is a part of."""
    is_required: bool
    shape: tuple[int, ...] | None  # None: any
    dtypes: set[torch.dtype] | None  # None: any

    def describe_mismatch(self, tensor: torch.Tensor) -> str | None:
        """Returns in words how the type or the shape of `tensor` differs from this one: an end for
        a sentence about the tensor. Returns None if it fits. A scalar tensor (shape []) fits the
        shape (1,)."""
        if self.dtypes is not None and tensor.dtype not in self.dtypes:
            expected = " or ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"its type must be {expected}, got {str(tensor.dtype).removeprefix('torch.')}"
        if self.shape not in (None, tuple(tensor.shape), (1,) if tensor.dim() == 0 else None):
            return f"its shape must be {list(self.shape)}, got {list(tensor.shape)}"
        return None


def list_tensors(model: nn.Module) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the name of each tensor that may be in a checkpoint of `model`, and what it must look
    like. Shapes and types in formats other than compressed-tensors' are left to vLLM. Of parameters
    that are tied, only the first is listed."""
    packed_modules = getattr(model, "packed_modules_mapping", {})
    seen = set[int]()
    for full_name, module in model.named_modules():
        # LoRA wraps layers once they are loaded. A server that has slept loads them again.
        name, method = full_name.replace(".base_layer", ""), getattr(module, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod):
            continue
        is_plain = method is None or isinstance(method, _UNQUANTISED)
        quantises = getattr(method, "uses_meta_device", False)  # while it loads, so without scales
        saved = {"weight", "bias"} if quantises else _SAVED
        if getattr(method, "use_a16", False):  # so inputs are not quantised
            saved = saved - {"input_global_scale"}
        is_known = is_plain or quantises or isinstance(method, _COMPRESSED)
        for kind, tensor in _saved_tensors(name, module):
            is_gates = isinstance(module, RoutedExperts) and not kind.startswith(("w13_", "w2_"))
            if id(tensor) in seen or is_gates:  # listed elsewhere
                continue
            seen.add(id(tensor))
            is_required = is_plain or kind.removeprefix("w13_").removeprefix("w2_") in saved
            types = next((types for types in _CONVERTED if tensor.dtype in types), {tensor.dtype})
            for part, shape in _list_parts(name, module, kind, tensor, packed_modules):
                look = (shape, types) if is_known and shape is not None else (None, None)
                parameter = f"{name}.{kind}".removeprefix(".")  # the model's own has no module
                yield part, TensorSpec(parameter, is_required, *look)
        if is_plain and isinstance(module, RoutedExperts):  # all of which may come as one tensor
            experts, config = name.removesuffix(".routed_experts"), module.moe_config
            hidden, inner = config.hidden_dim_unpadded, config.intermediate_size
            for leaf, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
                part, shape = f"{experts}.{leaf}", (config.num_experts, n, k)
                yield part, TensorSpec(part, False, shape, _CONVERTED[0])


def _saved_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of `module` itself that checkpoints may hold, by the last parts of their
    names."""
    yield from module.named_parameters(recurse=False)
    # Buffers: all of the vision tower's, and the layers' scalars.
    saved = module.state_dict().keys() if name.startswith("vision_tower") else {"layer_scalar"}
    yield from ((n, buffer) for n, buffer in module.named_buffers(recurse=False) if n in saved)


def _list_parts(
    name: str,
    module: nn.Module,
    kind: str,
    tensor: torch.Tensor,
    packed_modules: Mapping[str, list[str]],
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Yields name and whole shape of each tensor of a checkpoint that `tensor` joins, the parameter
    `kind` of `module`. A shape is None if it is not known."""
    if isinstance(module, RoutedExperts) and kind.startswith(("w13_", "w2_")):
        yield from _list_experts(name, module, kind, tensor)
    elif isinstance(module, LinearBase | VocabParallelEmbedding):
        held_outputs = getattr(module, "output_size_per_partition", module.output_size)
        held_inputs = getattr(module, "input_size_per_partition", module.input_size)
        for layer, outputs in _joined_layers(name, module, packed_modules):
            shape = _scaled(
                tensor.shape,
                (getattr(tensor, "output_dim", None), outputs, held_outputs),
                (getattr(tensor, "input_dim", None), module.input_size, held_inputs),
            )
            yield f"{layer}.{kind}", (1,) if isinstance(tensor, PerTensorScaleParameter) else shape
    else:
        # Ranks share the heads of a drafter's attention sinks, by a loader of their own.
        shape = None if kind == "attention_sink_bias" else tuple(tensor.shape)
        yield f"{name}.{kind}".removeprefix("."), shape


def _joined_layers(
    name: str, module: LinearBase | VocabParallelEmbedding, packed_modules: Mapping[str, list[str]]
) -> Iterator[tuple[str, int]]:
    """Yields name and output features of each of the checkpoint's layers that vLLM runs as part of
    `module`."""
    parent, _, leaf = name.rpartition(".")
    sizes = getattr(module, "output_sizes", [module.output_size])
    if isinstance(module, VocabParallelEmbedding):
        sizes = [module.org_vocab_size]
    elif isinstance(module, QKVParallelLinear):  # whose ranks may have copies of keys and values
        sizes = [sizes[0], *(size // module.num_kv_head_replicas for size in sizes[1:])]
    names = packed_modules.get(leaf, [leaf])
    if len(names) == 1:
        names, sizes = [leaf], [sum(sizes)]
    for part, size in zip(names, sizes, strict=True):
        yield f"{parent}.{part}".removeprefix("."), size


def _list_experts(
    name: str, module: RoutedExperts, kind: str, tensor: torch.Tensor
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Yields name and whole shape of each tensor of the experts that this rank holds."""
    config, is_here = module.moe_config, module.expert_map
    hidden = config.hidden_dim_unpadded, config.hidden_dim
    inner = config.intermediate_size, config.intermediate_size_per_partition
    joined, _, kind = kind.partition("_")
    parts = ("gate_proj", "up_proj") if joined == "w13" else ("down_proj",)
    outputs, inputs = (inner, hidden) if joined == "w13" else (hidden, inner)
    granularity = getattr(tensor, "quant_method", None)
    shape: tuple[int, ...] | None = (1,) if granularity == "tensor" else None
    if tensor.dim() == 3 and not getattr(tensor, "is_transposed", False):
        by_channel = granularity == "channel" and tensor.shape[2] == 1
        shape = _scaled(
            tensor.shape[1:],
            (0, outputs[0], len(parts) * outputs[1]),
            (None if by_channel else 1, *inputs),
        )
    for expert in range(config.num_experts):
        if is_here is None or is_here[expert] >= 0:
            for part in parts:
                yield f"{name.removesuffix('.routed_experts')}.{expert}.{part}.{kind}", shape


def _scaled(
    shape: Sequence[int], *dimensions: tuple[int | None, int, int]
) -> tuple[int, ...] | None:
    """Returns `shape` for other numbers of features. `dimensions`: each with its features, and
    those that `shape` is for. A dimension may be packed, or have one number for a group of
    features. None: the features are not whole groups."""
    scaled = list(shape)
    for dimension, features, held in dimensions:
        if dimension is not None:
            scaled[dimension], rest = divmod(scaled[dimension] * features, held)
            if rest:
                return None
    return tuple(scaled)
