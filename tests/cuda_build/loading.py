"""Models whose weights nobody knows: their layers prepare them as on a GPU, only the shapes are
true."""

from typing import Any

import torch


def make_up_nothing() -> None:
    """vLLM would draw dummy weights on the device, and note what it needs to load them anew.

    A parameter that is not there is of no class of vLLM's, which would say which of its dimensions
    is which. Those that Marlin asks for lie as compressed-tensors writes them, [out, in].
    """
    from vllm.model_executor.kernels.linear.mixed_precision import marlin
    from vllm.model_executor.model_loader import base_loader, dummy_loader, utils

    marlin.BasevLLMParameter = torch.Tensor
    marlin.permute_param_layout_ = _transpose

    dummy_loader.DummyModelLoader.load_weights = _ignore
    for module in (base_loader, utils):
        if hasattr(module, "record_metadata_for_reloading"):
            module.record_metadata_for_reloading = _ignore


def _transpose(parameter: torch.Tensor, **_: Any) -> None:
    parameter.data = parameter.data.t()


def _ignore(*_: Any, **__: Any) -> None:
    pass
