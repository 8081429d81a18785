"""Scales that a quantised model must not be served with, found as soon as they are loaded."""

import torch
from torch import nn

_FP32_SCALES = ("weight_scale", "weight_global_scale", "input_global_scale")


def check_scales(model: nn.Module) -> None:
    """Raises ValueError where a scale is no positive number, and where linears that run as one have
    different global scales of their weights: vLLM would take one of them for all."""
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2].removeprefix("w13_").removeprefix("w2_")
        if kind not in _FP32_SCALES or parameter.dtype != torch.float32 or parameter.is_meta:
            continue
        if not (parameter.isfinite() & (parameter > 0)).all():
            raise ValueError(f"{name} must hold positive numbers only")
        # [linears that run as one], for gate and up of the experts [E, 2]
        is_fused = kind == "weight_global_scale" and not name.endswith(".w2_weight_global_scale")
        if is_fused and (parameter != parameter[..., :1]).any():
            raise ValueError(
                f"the linears that {name} is made of must share one weight_global_scale, got "
                f"{parameter.unique().tolist()[:4]}: vLLM runs them as one. Quantise the bf16 "
                f"checkpoint with `vllm-dllm quantize --scheme nvfp4`"
            )
