"""Which tensors of a masked model's checkpoint are quantised, which are left, and why.

The linears of the layers are quantised, experts too, which these checkpoints keep one by one.
"""

import re
from collections.abc import Iterator, Mapping

from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import TensorInfo
from vllm_dllm.tools.quantize.plan import Linear, Plan, check_linear

_LINEAR = re.compile(
    r"((?:model|encoder)\.layers\.\d+\..*\.)(\w+_proj|query_key_value|dense)\.weight"
)
_TOGETHER = (("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"))
_HEADS = ("lm_head", "diffusion_head")
KEPT = (
    (
        r"\w+\.(embed_tokens|word_embeddings)\.weight|(lm|diffusion)_head\.weight",
        "embeddings, LM head",
    ),
    (r".*\.mlp\.gate\..*", "router: an error picks other experts"),
    (r".*norm\.weight", "norms"),
    (r".*\.bias", "biases"),
)


def make_masked_plan(scheme: str, tensors: Mapping[str, TensorInfo], num_layers: int) -> Plan:
    """Decides about every tensor. InputError if one is unknown, missing or has a wrong shape."""
    if scheme == "nvfp4":
        raise InputError(
            "nvfp4 is for DiffusionGemma alone, whose inputs it measures while that denoises; a "
            "masked model takes --scheme fp8-dynamic, int8 or w4a16"
        )
    quantized: dict[str, tuple[Linear, ...]] = {}
    kept: dict[str, str] = {}
    for name, info in tensors.items():
        if _LINEAR.fullmatch(name):
            quantized[name] = (linear := _linear(name, info),)
            check_linear(name, info, linear.shape[1], scheme)
        else:
            kept[name] = _reason(name)
    for name in _expected(quantized, num_layers):
        if name not in quantized:
            raise InputError(
                f"the checkpoint has no tensor {name}: expected all layers of config.json; copy or "
                f"save the checkpoint again"
            )
    routers = {
        name.removesuffix(".weight")
        for name in kept
        if ".mlp.gate." in name and len(tensors[name].shape) == 2
    }
    return Plan(scheme, quantized, kept, sorted({*_HEADS, *routers}))


def _linear(name: str, info: TensorInfo) -> Linear:
    if len(info.shape) != 2:
        raise InputError(f"{name}: expected 2 axes, got the shape {list(info.shape)}")
    module, (out, width) = name.removesuffix(".weight"), info.shape
    return Linear(module, None, slice(out), (out, width), module, module)


def _reason(name: str) -> str:
    for pattern, reason in KEPT:
        if re.fullmatch(pattern, name):
            return reason
    raise InputError(
        f"{name} is not a tensor of a masked model that is served: expected a checkpoint as it is "
        f"published"
    )


def _expected(quantized: Mapping[str, object], num_layers: int) -> Iterator[str]:
    """Gives names that must be there beside the ones that are. All layers must have some."""
    if not quantized:
        return
    layers = {int(name.split(".")[2]) for name in quantized}
    first = min(quantized)
    for missing in set(range(num_layers)) - layers:
        yield re.sub(r"\.layers\.\d+\.", f".layers.{missing}.", first)
    for name in quantized:
        match = _LINEAR.fullmatch(name)
        assert match is not None
        for together in _TOGETHER:
            if match[2] in together:
                yield from (f"{match[1]}{part}.weight" for part in together)
