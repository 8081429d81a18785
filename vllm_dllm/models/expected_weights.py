"""Checks that a checkpoint holds every tensor that the model needs: names, shapes, types, valid
scales and finite numbers.

vLLM counts parameters. A parameter assembled from many tensors (q, k and v; all experts) counts as
loaded after the first, and silently accepts smaller tensors and other types. Here every tensor is
counted and checked, so that no half-loaded model is served, and none with NaN weights, which would
answer nothing, with HTTP 200.

Names have the prefixes that the model's `hf_to_vllm_mapper` gives to the checkpoint's.
"""

import re
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

_MOST_NAMED = 8  # missing tensors that an error names
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

    def find_mismatch(self, tensor: torch.Tensor) -> str | None:
        """Returns how `tensor` differs in type or shape, in words. Returns None if it fits."""
        if tensor.dtype not in self.dtypes:
            expected = " or ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"its type must be {expected}, got {str(tensor.dtype).removeprefix('torch.')}"
        scalar = self.shape == (1,) and tensor.dim() == 0
        if tuple(tensor.shape) != self.shape and not scalar:
            return f"its shape must be {list(self.shape)}, got {list(tensor.shape)}"
        return None


class ExpectedWeights:
    """Checks each tensor on its way into `model` and knows which are still missing.

    Layers of formats other than those of `vllm-dllm quantize` are left to vLLM, unchecked.
    """

    def __init__(
        self,
        model: nn.Module,
        packed_modules: Mapping[str, list[str]],
        absent: set[str],  # layers that have another's weights
    ) -> None:
        self._expected = {
            name: tensor
            for name, tensor in _expected_tensors(model, packed_modules)
            if name.rpartition(".")[0] not in absent
        }
        self._layers = {name.rpartition(".")[0] for name in self._expected}
        self._missing = {name for name, tensor in self._expected.items() if not tensor.stands_for}
        self._first_of_fused: dict[str, tuple[str, float]] = {}

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Marks the tensor as found. Raises ValueError if it does not fit, belongs to a layer that
        has no use for it, or holds an impossible scale."""
        if complaint := describe_wrong_scale(name.rpartition(".")[2], tensor):
            raise ValueError(complaint)
        expected = self._expected.get(name)
        if expected is None:
            layer, _, kind = name.rpartition(".")
            if layer in self._layers and kind.startswith(("weight", "input", "output")):
                known = sorted(n.rpartition(".")[2] for n in self._expected if n.startswith(layer))
                raise ValueError(
                    f"the layer has no {kind}, only {known}: quantization_config in config.json "
                    f"describes another format, or leaves this layer unquantised"
                )
            return
        if complaint := expected.find_mismatch(tensor):
            raise ValueError(complaint)
        if expected.equal_in and not tensor.is_meta:
            first, value = self._first_of_fused.setdefault(expected.equal_in, (name, tensor.item()))
            if tensor.item() != value:
                raise ValueError(
                    f"its value must be that of {checkpoint_name(first)}, {value}, got "
                    f"{tensor.item()}: vLLM runs the two linears as one. Quantise the bf16 "
                    f"checkpoint with `vllm-dllm quantize --scheme nvfp4`"
                )
        self._missing -= {name, *expected.stands_for}

    def check_complete(self) -> None:
        """Raises ValueError if tensors are missing, with their names in checkpoints."""
        if self._missing:
            first = [checkpoint_name(name) for name in sorted(self._missing)[:_MOST_NAMED]]
            rest = len(self._missing) - len(first)
            more = f" and {rest} more" if rest else ""
            raise ValueError(f"no weights for {', '.join(first)}{more}")


def checkpoint_name(name: str) -> str:
    """Returns the name that transformers gives to our model's tensor `name`."""
    if name.startswith("self_conditioning."):
        return f"model.decoder.{name}"
    if name.startswith(("vision_tower.", "embed_vision.")):
        return f"model.encoder.{name}"
    return re.sub(r"^model\.", "model.decoder.", name)


def _expected_tensors(
    model: nn.Module, packed_modules: Mapping[str, list[str]]
) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the name of each tensor that may be in a checkpoint, and what it must look like."""
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, LinearBase):
            if (scheme := _scheme(own)) is not None:
                for linear, out_features in _fused_parts(name, module, packed_modules):
                    yield from _linear_tensors(
                        linear, name, scheme, out_features, module.input_size
                    )
                    if "bias" in own:
                        yield f"{linear}.bias", TensorSpec((out_features,), FLOATS)
        elif isinstance(module, RoutedExperts):
            own = {n.removeprefix("w13_"): p for n, p in own.items() if n.startswith("w13_")}
            if (scheme := _scheme(own)) is not None:
                yield from _expert_tensors(name.removesuffix(".routed_experts"), module, scheme)
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


def _scheme(parameters: Mapping[str, torch.Tensor]) -> str | None:
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


def _expert_tensors(
    name: str, module: RoutedExperts, scheme: str
) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the tensors of the experts that this rank holds. Unquantised ones may also come as one
    tensor for all experts."""
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


_E4M3_NAN = 0x7F  # and with the sign; the type has no infinity


def describe_non_finite(weight: torch.Tensor) -> str | None:
    """Returns what to say of a checkpoint's tensor that holds NaN or infinity; None if it is
    finite. A finite sum shows that, so most tensors are read once."""
    if weight.is_meta:
        return None
    if weight.dtype == torch.float8_e4m3fn:
        wrong = (weight.view(torch.uint8) & _E4M3_NAN) == _E4M3_NAN
    elif weight.is_floating_point() and weight.dtype.itemsize > 1:
        if weight.sum(dtype=torch.float32).isfinite():
            return None
        wrong = ~weight.isfinite()
    else:
        return None
    count = int(wrong.sum())
    if count == 0:
        return None
    return (
        f"its numbers must be finite, got {count} of {weight.numel()} that are not, the first "
        f"{weight[wrong][0].item()}"
    )


SCALES = {
    *("weight_scale", "weight_scale_2", "weight_global_scale"),
    *("input_scale", "input_global_scale", "k_scale", "v_scale"),
}
"""The last parts of the names of scales in checkpoints."""


def describe_wrong_scale(kind: str, tensor: torch.Tensor) -> str | None:
    """Returns what to say of a scale, or scales of groups, that are not positive finite numbers.
    Returns None for right ones, for other kinds of tensors, and on the meta device."""
    if kind not in SCALES or tensor.is_meta or not tensor.is_floating_point():
        return None
    values = tensor.float()
    fit = (values > 0) & values.isfinite()
    if fit.all():
        return None
    return f"it must only hold positive numbers, got {values[~fit][0].item()}"
