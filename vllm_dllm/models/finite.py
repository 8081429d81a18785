"""A model whose weights are not all numbers answers nothing, with HTTP 200: it is not served."""

import torch

_E4M3_NAN = 0x7F  # and with the sign; the type has no infinity


def complaint(weight: torch.Tensor) -> str | None:
    """What is wrong with a checkpoint's tensor that holds NaN or infinity. Reads it once: a sum is
    a number unless something in it is not, or it overflows."""
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
