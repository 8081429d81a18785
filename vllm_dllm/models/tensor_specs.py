"""Says which tensors a checkpoint holds for a model, and what they must look like.

Names have the prefixes that the model's `hf_to_vllm_mapper` gives to the checkpoint's.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_dllm.quantization.schemes import GROUP_SIZE, INT4_GROUP_SIZE

FLOATS = {torch.bfloat16, torch.float16, torch.float32}  # converted when loaded
_BY_CHANNEL = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}  # with a scale for each channel


class TensorSpec(NamedTuple):
    """What a tensor of a checkpoint must look like."""

    shape: tuple[int, ...]
    dtypes: set[torch.dtype]
    stands_for: tuple[str, ...] = ()
    """Names of tensors that this one may replace."""
    equal_in: str = ""
    """The fused linear whose parts must share its value: vLLM uses one for all of them."""

    def describe_mismatch(self, tensor: torch.Tensor) -> str | None:
        """Returns in words how the type or the shape of `tensor` differs from this one: an end for
        a sentence about the tensor. Returns None if it fits. A scalar tensor (shape []) fits the
        shape (1,)."""
        if tensor.dtype not in self.dtypes:
            expected = " or ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"its type must be {expected}, got {str(tensor.dtype).removeprefix('torch.')}"
        scalar = self.shape == (1,) and tensor.dim() == 0
        if tuple(tensor.shape) != self.shape and not scalar:
            return f"its shape must be {list(self.shape)}, got {list(tensor.shape)}"
        return None


def list_tensors(
    model: nn.Module, packed_modules: Mapping[str, list[str]]
) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the name of each tensor that may be in a checkpoint of `model`, and what it must look
    like. `packed_modules`: the model's `packed_modules_mapping`."""
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, LinearBase):
            yield from _fused_tensors(name, module, packed_modules)
        elif isinstance(module, RoutedExperts):
            yield from _expert_tensors(name.removesuffix(".routed_experts"), module)
        elif isinstance(module, VocabParallelEmbedding):
            if own.keys() == {"weight"}:
                shape = (module.org_vocab_size, module.embedding_dim)
                yield f"{name}.weight", TensorSpec(shape, FLOATS)
        elif not isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            # Buffers that checkpoints hold: all of the vision tower's, and the layers' scalars.
            in_tower = name.startswith("vision_tower")
            saved = module.state_dict().keys() if in_tower else {"layer_scalar"}
            own |= {n: b for n, b in module.named_buffers(recurse=False) if n in saved}
            for kind, tensor in own.items():
                yield f"{name}.{kind}", TensorSpec(tuple(tensor.shape), FLOATS)


def _find_scheme(parameters: Mapping[str, torch.Tensor]) -> str | None:
    """Returns the format of a layer with these parameters; None if it is left to vLLM."""
    names = parameters.keys() - {"bias"}
    if names == {"weight"} and parameters["weight"].dtype in FLOATS:
        return "unquantised"
    if (
        names == {"weight", "weight_scale"}
        and parameters["weight"].dtype in _BY_CHANNEL
        and parameters["weight_scale"].shape[-1] == 1
        and parameters["weight_scale"].shape[-2:-1] == parameters["weight"].shape[-2:-1]
    ):
        return _BY_CHANNEL[parameters["weight"].dtype]
    if names == {"weight_packed", "weight_scale", "weight_shape"} and (
        8 * parameters["weight_packed"].shape[-1]
        == INT4_GROUP_SIZE * parameters["weight_scale"].shape[-1]
    ):
        return "w4a16"
    if names == {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"} and (
        parameters["weight_scale"].dtype == torch.float8_e4m3fn
    ):
        return "nvfp4"
    return None


def _linear_tensors(
    name: str, fused: str, scheme: str, n: int, k: int
) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the tensors of one linear with weights [n, k], which vLLM runs as part of `fused`."""
    e4m3 = {torch.float8_e4m3fn}
    match scheme:
        case "unquantised":
            kinds = {"weight": TensorSpec((n, k), FLOATS)}
        case "fp8" | "int8":
            dtypes = {torch.int8} if scheme == "int8" else e4m3
            kinds = {
                "weight": TensorSpec((n, k), dtypes),
                "weight_scale": TensorSpec((n, 1), FLOATS),
            }
        case "w4a16":
            kinds = {
                "weight_packed": TensorSpec((n, k // 8), {torch.int32}),
                "weight_scale": TensorSpec((n, k // INT4_GROUP_SIZE), FLOATS),
                "weight_shape": TensorSpec((2,), {torch.int64, torch.int32}),
            }
        case "nvfp4":
            kinds = {
                "weight_packed": TensorSpec((n, k // 2), {torch.uint8}),
                "weight_scale": TensorSpec((n, k // GROUP_SIZE), e4m3),
                "weight_global_scale": TensorSpec((1,), {torch.float32}, equal_in=fused),
                "input_global_scale": TensorSpec((1,), {torch.float32}),
            }
    for kind, tensor in kinds.items():
        yield f"{name}.{kind}", tensor


def _fused_tensors(
    name: str, module: LinearBase, packed_modules: Mapping[str, list[str]]
) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the tensors of each linear that vLLM runs as part of `module`."""
    own = dict(module.named_parameters(recurse=False))
    if (scheme := _find_scheme(own)) is None:
        return
    for linear, out_features in _fused_parts(name, module, packed_modules):
        yield from _linear_tensors(linear, name, scheme, out_features, module.input_size)
        if "bias" in own:
            yield f"{linear}.bias", TensorSpec((out_features,), FLOATS)


def _fused_parts(
    name: str, module: LinearBase, packed_modules: Mapping[str, list[str]]
) -> Iterator[tuple[str, int]]:
    """Yields name and output features of each linear that vLLM runs as part of `module`."""
    parent, _, leaf = name.rpartition(".")
    if isinstance(module, QKVParallelLinear):
        heads = {
            "q_proj": module.total_num_heads * module.head_size,
            "k_proj": module.total_num_kv_heads * module.head_size,
            "v_proj": module.total_num_kv_heads * module.v_head_size,
        }
        for part in packed_modules[leaf]:
            yield f"{parent}.{part}", heads[part]
    elif isinstance(module, MergedColumnParallelLinear):
        for part, size in zip(packed_modules[leaf], module.output_sizes, strict=True):
            yield f"{parent}.{part}", size
    else:
        yield name, module.output_size


def _expert_tensors(name: str, module: RoutedExperts) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the tensors of the experts that this rank holds. Unquantised ones may also come as one
    tensor for all experts."""
    own = dict(module.named_parameters(recurse=False)).items()
    scheme = _find_scheme({n.removeprefix("w13_"): p for n, p in own if n.startswith("w13_")})
    if scheme is None:
        return
    config, expert_map = module.moe_config, module.expert_map
    count, hidden, inner = config.num_experts, config.hidden_dim_unpadded, config.intermediate_size
    local = [e for e in range(count) if expert_map is None or expert_map[e] >= 0]
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for expert in local:
        for part, (n, k) in sizes.items():
            fused = f"{name}.{expert}.{'down' if part == 'down_proj' else 'gate_up'}"
            yield from _linear_tensors(f"{name}.{expert}.{part}", fused, scheme, n, k)
    if scheme == "unquantised":
        for fused, parts, n, k in (
            ("gate_up_proj", ("gate_proj", "up_proj"), 2 * inner, hidden),
            ("down_proj", ("down_proj",), hidden, inner),
        ):
            names = tuple(f"{name}.{e}.{part}.weight" for e in local for part in parts)
            yield f"{name}.{fused}", TensorSpec((count, n, k), FLOATS, stands_for=names)
