"""Checks that a checkpoint holds every tensor that the model needs: names, shapes, types, valid
scales and finite numbers.

vLLM counts parameters. A parameter assembled from many tensors (q, k and v; all experts) counts as
loaded after the first, and silently accepts smaller tensors and other types. Here every tensor is
counted and checked, so that no half-loaded model is served, and none with NaN weights, which would
answer nothing, with HTTP 200.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.models.tensor_specs import TensorSpec, list_tensors
from vllm_dllm.quantization.complete_weights import (
    CompleteWeights,
    describe_missing,
    must_be_complete,
    name_in_checkpoint,
)

# Of the vision tower's linears; infinite where nothing is clipped.
_CLIPPING_BOUNDS = {"input_min", "input_max", "output_min", "output_max"}


class ExpectedWeights:
    """Checks each tensor on its way into `model` and knows which are still missing. Layers of
    formats other than those of `vllm-dllm quantize` are left to vLLM, unchecked."""

    def __init__(
        self,
        model: nn.Module,
        mapper: WeightsMapper,  # from the checkpoint's names to those of `model`
        absent: set[str],  # layers that have another's weights
    ) -> None:
        self._mapper = mapper
        self._expected = {
            name: tensor
            for name, tensor in list_tensors(model, model.packed_modules_mapping)
            if name.rpartition(".")[0] not in absent
        }
        self._layers = {name.rpartition(".")[0] for name in self._expected}
        self._missing = {name for name, tensor in self._expected.items() if not tensor.stands_for}
        self._first_of_fused: dict[str, tuple[str, float]] = {}
        self.position = "before the first weight"
        """How far `check_each` has come, in words for an error."""

    def check_each(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the checkpoint's names and weights, each checked before.

        Raises ValueError for a wrong tensor, and for two whose names address one parameter and
        whose numbers differ. transformers ties the weights of encoder and decoder, and saves one
        of them. But it keeps both copies of `layer_scalar`, a buffer, and of weights where
        `tie_word_embeddings` is false or the two differ. The one backbone here has one copy.
        """
        seen: dict[str, tuple[str, torch.Tensor]] = {}
        for name, weight in weights:
            self.position = f"at {name} of shape {list(weight.shape)}"
            if (own_name := self._mapper.map_name(name)) is not None:
                self._check(own_name, weight)
                # Inputs of encoder and decoder may be scaled differently.
                if not weight.is_meta and own_name.rpartition(".")[2] not in SCALES:
                    sample = sample_numbers(weight)
                    first, numbers = seen.setdefault(own_name, (name, sample))
                    if not torch.equal(numbers, sample):
                        raise ValueError(
                            f"its numbers are not those of {first}, and encoder and decoder must "
                            f"share them"
                        )
            yield name, weight
            self.position = f"after {name}"

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Marks the tensor that the model calls `name` as found. Raises ValueError if it does not
        fit, belongs to a layer that has no use for it, or holds numbers that it must not."""
        layer, _, kind = name.rpartition(".")
        if complaint := describe_wrong_scale(kind, tensor):
            raise ValueError(complaint)
        expected = self._expected.get(name)
        if expected is not None:
            self._check_expected(name, tensor, expected)
        elif layer in self._layers and kind.startswith(("weight", "input", "output")):
            known = sorted(n.rpartition(".")[2] for n in self._expected if n.startswith(layer))
            raise ValueError(
                f"the layer has no {kind}, only {known}: quantization_config in config.json "
                f"describes another format, or leaves this layer unquantised"
            )
        if kind not in _CLIPPING_BOUNDS and (complaint := describe_non_finite(tensor)):
            raise ValueError(complaint)

    def _check_expected(self, name: str, tensor: torch.Tensor, expected: TensorSpec) -> None:
        """Marks the tensor, and those that it stands for, as found. Raises ValueError unless it is
        as expected."""
        if complaint := expected.describe_mismatch(tensor):
            raise ValueError(complaint)
        if expected.equal_in and not tensor.is_meta:
            first, value = self._first_of_fused.setdefault(expected.equal_in, (name, tensor.item()))
            if tensor.item() != value:
                raise ValueError(
                    f"its value must be that of {name_in_checkpoint(first, self._mapper)}, "
                    f"{value}, got {tensor.item()}: vLLM runs the two linears as one. Quantise the "
                    f"bf16 checkpoint with `vllm-dllm quantize --scheme nvfp4`"
                )
        self._missing -= {name, *expected.stands_for}

    def check_complete(self) -> None:
        """Raises ValueError if tensors are missing, with their names in the checkpoint."""
        if self._missing and must_be_complete():
            raise ValueError(describe_missing(sorted(self._missing), self._mapper))


@contextmanager
def errors_at_a_tensor(checked: ExpectedWeights | CompleteWeights, advice: str) -> Iterator[None]:
    """Has errors of vLLM's loaders, which are of many kinds, end as a ValueError that says how far
    `checked` has come, and `advice`. Errors that are not the checkpoint's pass as they are: a
    package that `--load-format` needs is missing, or memory."""
    try:
        yield
    except (ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        complaint = str(error).rstrip(".")
        if isinstance(error, AssertionError) and not complaint:  # as loaders assert shapes
            complaint = "its shape does not fit config.json"
        raise ValueError(
            f"Cannot load the checkpoint: {checked.position}: {complaint}. {advice}"
        ) from error


def check_numbers(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a checkpoint's names and weights. Raises ValueError for one that holds NaN or
    infinity, or is an impossible scale."""
    for name, weight in weights:
        complaint = describe_wrong_scale(name.rpartition(".")[2], weight)
        if complaint := complaint or describe_non_finite(weight):
            raise ValueError(complaint)
        yield name, weight


def sample_numbers(weight: torch.Tensor) -> torch.Tensor:
    """Returns at most 256 numbers from everywhere in `weight`, as bytes: a copy."""
    numbers = weight.reshape(-1)
    return numbers[:: max(1, len(numbers) // 128)].clone().view(torch.uint8)


_E4M3_NAN = 0x7F  # and with the sign; the type has no infinity


def describe_non_finite(weight: torch.Tensor) -> str | None:
    """Returns what to say of a checkpoint's tensor that holds NaN or infinity; None if it is
    finite. The smallest and the largest number show that many times faster than a look at each."""
    if weight.is_meta or weight.numel() == 0:
        return None
    if weight.dtype == torch.float8_e4m3fn:
        bits = weight.view(torch.uint8)
        # With the sign a NaN is the largest unsigned byte, without it the largest signed one.
        if bits.max() < 0x80 | _E4M3_NAN and bits.view(torch.int8).max() < _E4M3_NAN:
            return None
        wrong = (bits & _E4M3_NAN) == _E4M3_NAN
    elif weight.is_floating_point() and weight.dtype.itemsize > 1:
        smallest, largest = weight.aminmax()  # both NaN if one number is
        if smallest.isfinite() and largest.isfinite():
            return None
        wrong = ~weight.isfinite()
    else:
        return None
    count = int(wrong.sum())
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
    `kind`: the last part of the tensor's name. Returns None for right scales, for other kinds of
    tensors, for integers, which have the wrong type, and for tensors on the meta device."""
    if kind not in SCALES or tensor.is_meta or not tensor.is_floating_point():
        return None
    if tensor.numel() == 0:
        return None
    if tensor.dtype == torch.float8_e4m3fn:  # in the order of its bytes, of which NaN is the last
        numbers, end = tensor.view(torch.uint8), float(_E4M3_NAN)
    else:
        numbers, end = tensor.float(), math.inf
    smallest, largest = numbers.aminmax()  # both NaN if one number is
    if smallest > 0 and largest < end:
        return None
    values = tensor.float()
    fit = (values > 0) & values.isfinite()
    return f"it must only hold positive finite numbers, got {values[~fit][0].item()}"
