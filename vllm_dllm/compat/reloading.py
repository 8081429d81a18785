"""Other weights for a model that is being served: vLLM's `reload_weights`, on CPUs too.

vLLM loads each layer once more, prepares its weights for their kernels, and copies them to where
the old ones are, so that whoever holds the tensors has the new ones. On CPUs kernels have copies of
their own: matrices that oneDNN or vLLM has packed. Those must follow, and stay where they are,
because a compiled model knows them, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm._custom_ops import CPUDNNLGEMMHandler
from vllm.config import ModelConfig
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8 as Int8,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise

Linear = Callable[..., torch.Tensor]


def keep_packed_weights_current() -> None:
    """Of linears and experts, in this process, which is a CPU worker. Repeatable."""
    if utils.dispatch_cpu_unquantized_gemm.__module__ == __name__:
        return
    stock_dispatch = utils.dispatch_cpu_unquantized_gemm
    stock_set_up = UnquantizedFusedMoEMethod._setup_kernel

    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        before: Linear | None = getattr(layer, "cpu_linear", None)
        stock_dispatch(layer, remove_weight)
        if before is not None:
            layer.cpu_linear = _renewed(before, layer.cpu_linear)

    def set_up(self: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        is_reload = self.moe_kernel is not None
        stock_set_up(self, layer, *args, **kwargs)
        if is_reload:  # vLLM packs the first weights alone
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    UnquantizedFusedMoEMethod._setup_kernel = set_up


@torch.inference_mode()
def _renewed(before: Linear, after: Linear) -> Linear:
    """`before`, which holds now what `after` holds. `after` itself if the two compute in different
    ways: the layer had no weights when `before` was made."""
    codes = {getattr(each, "__code__", each) for each in (before, after)}
    if len(codes) > 1 or not hasattr(before, "__closure__"):
        return after
    held = zip(before.__closure__ or (), after.__closure__ or (), strict=True)
    for old, new in ((a.cell_contents, b.cell_contents) for a, b in held):
        if isinstance(old, CPUDNNLGEMMHandler):
            # It holds an address. What was there is freed with `after`.
            address = old.handler_tensor.clone()
            old.handler_tensor.copy_(new.handler_tensor)
            new.handler_tensor.copy_(address)
        elif isinstance(old, torch.Tensor):
            old.copy_(new)
    return before


def _pack_tied_weights(model: nn.Module) -> None:
    """vLLM prepares what it has loaded. An LM head that has the embeddings' weights has copies of
    its own, too."""
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and isinstance(
            layer.quant_method, UnquantizedEmbeddingMethod
        ):
            layer.quant_method.process_weights_after_loading(layer)


def reload(
    model_config: ModelConfig,
    model: nn.Module,
    load: Callable[[], None],  # vLLM's `reload_weights`, with its arguments
    restore: Callable[[], None],  # without any
) -> None:
    """Where it fails, the model has the weights again that it had last from disk.

    Raises:
        ValueError: the weights cannot be loaded; the old ones are. Those in int8 never can.
        WeightsLost: nor can the old ones. The model computes nothing that makes sense.
    """
    if any(isinstance(getattr(layer, "scheme", None), Int8) for layer in model.modules()):
        raise ValueError(
            "Cannot reload weights: int8 weights are packed by oneDNN once, and nothing else is "
            "kept of them. Start the server anew."
        )
    names = ("model", "model_weights", "revision")
    source = {name: getattr(model_config, name) for name in names}
    try:
        load()
    except Exception as error:
        _give_up(model)
        for name, value in source.items():
            setattr(model_config, name, value)
        try:
            restore()
        except Exception as again:
            raise WeightsLost(
                f"Neither new weights could be loaded ({error}), nor could those of "
                f"{model_config.model} again ({again}). Start the server anew."
            ) from error
        _pack_tied_weights(model)
        raise ValueError(
            f"Cannot reload weights: {error} The model has those of {model_config.model} again."
        ) from error
    _pack_tied_weights(model)


class WeightsLost(RuntimeError):
    """A model has a part of its old weights and a part of new ones."""


def _give_up(model: nn.Module) -> None:
    """Layers that are waiting for their weights have the old ones; others may have new ones."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
