"""Loads a checkpoint's tensors into a model, each checked: its name, shape, type and numbers, and
that none is missing.

vLLM counts parameters. A parameter that joins many tensors (q, k and v; all experts) counts as
loaded after the first, and silently accepts smaller tensors and other types. Here every tensor
counts, so that no half-loaded model is served, and none with NaN weights, which would answer
nothing, with HTTP 200.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.quantization.tensor_specs import list_tensors

Weights = Iterable[tuple[str, torch.Tensor]]
_MOST_NAMED = 8  # missing tensors that an error names
# Of the vision tower's linears; infinite where nothing is clipped.
_CLIPPING_BOUNDS = {"input_min", "input_max", "output_min", "output_max"}
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


def load_checked(
    model: nn.Module,
    load: Callable[[Weights], set[str] | None],
    weights: Weights,
    mapper: WeightsMapper,  # from the checkpoint's names to those of `model`
    optional: tuple[str, ...] = (),  # beginnings of the model's names that may be missing
) -> set[str]:
    """Has `load` load `weights` into `model`, and returns what it does: names of parameters.

    Raises ValueError, naming the tensor, if one is missing, unknown, of another shape or type, not
    all numbers, or an impossible scale, and if `load` fails. Errors that are not the checkpoint's
    pass as they are: a package that `--load-format` needs is missing, or memory.
    """
    checked = _CheckedWeights(model, mapper)
    try:
        loaded = load(checked.check_each(weights)) or set()
        if not _come_in_parts.get():
            checked.check_complete(loaded, optional)
    except (ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a loader raises
        raise ValueError(
            f"Cannot load the checkpoint: {checked.explain(error)}. Check that its files are "
            f"complete and belong together, and to its config.json."
        ) from error
    return loaded


class _CheckedWeights:
    """Checks each tensor on its way into `model` and knows which are still missing."""

    def __init__(self, model: nn.Module, mapper: WeightsMapper) -> None:
        self._mapper = mapper
        self._expected = dict(list_tensors(model))
        self._parts: dict[str, list[str]] = defaultdict(list)  # parameter -> its tensors
        for name, expected in self._expected.items():
            self._parts[expected.parameter].append(name)
        self._found = set[str]()
        self._first_scales: dict[tuple[str, str], tuple[str, float]] = {}
        self._position = ""
        self._current = ""

    def check_each(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the checkpoint's names and weights, each checked before.

        Raises ValueError for a wrong tensor, and for two whose names address one parameter and
        whose numbers differ. transformers ties the weights of encoder and decoder, and saves one
        of them. But it keeps both copies of `layer_scalar`, a buffer, and of weights where
        `tie_word_embeddings` is false or the two differ. The one backbone here has one copy.
        """
        seen: dict[str, tuple[str, torch.Tensor]] = {}
        self._position = "before the first weight: "
        for name, weight in weights:
            self._position = f"at {name} of shape {list(weight.shape)}: "
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
            self._current = own_name or ""
            yield name, weight
            self._position, self._current = f"after {name}: ", ""
        self._position = ""

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Marks the tensor that the model calls `name` as found. Raises ValueError if it does not
        fit, or holds numbers that it must not."""
        layer, _, kind = name.rpartition(".")
        if complaint := describe_wrong_numbers(kind, tensor):
            raise ValueError(complaint)
        self._found.add(name)
        if (expected := self._expected.get(name)) is not None:
            if complaint := expected.describe_mismatch(tensor):
                raise ValueError(complaint)
            if kind == "weight_global_scale" and not tensor.is_meta:
                self._check_is_shared(
                    name, tensor.item(), (expected.parameter, layer.rpartition(".")[0])
                )

    def _check_is_shared(self, name: str, scale: float, joined: tuple[str, str]) -> None:
        """Raises ValueError if another linear that vLLM runs as one with that of `name` has another
        global scale: vLLM uses one for all. `joined`: their parameter, and module."""
        first, value = self._first_scales.setdefault(joined, (name, scale))
        if scale != value:
            raise ValueError(
                f"its value must be that of {self._name_in_checkpoint(first)}, {value}, got "
                f"{scale}: vLLM runs the two linears as one. Quantise the bf16 checkpoint again, "
                f"with one scale for both"
            )

    def check_complete(self, loaded: set[str], optional: tuple[str, ...]) -> None:
        """Raises ValueError, with their names in the checkpoint, if tensors are missing. `loaded`:
        parameters that were loaded, some from tensors of other names. If one part of a parameter
        has come, all parts must."""
        missing = [
            name
            for parameter, parts in self._parts.items()
            if not self._found.isdisjoint(parts)
            or (self._expected[parts[0]].is_required and parameter not in loaded)
            for name in parts
            if name not in self._found and not name.startswith(optional)
        ]
        if missing:
            first = ", ".join(map(self._name_in_checkpoint, missing[:_MOST_NAMED]))
            rest = len(missing) - _MOST_NAMED
            raise ValueError(f"no weights for {first}" + (f" and {rest} more" if rest > 0 else ""))

    def _name_in_checkpoint(self, name: str) -> str:
        """Returns the name that the mapper renames to `name`, a tensor of the model."""
        for old, new in self._mapper.orig_to_new_prefix.items():
            if new is not None and name.startswith(new):
                return old + name.removeprefix(new)
        return name

    def explain(self, error: Exception) -> str:
        """Returns what to say of an error of a check or of vLLM's loaders: how far the loading has
        come, and what is wrong there."""
        complaint = str(error).rstrip(".")
        layer, _, kind = self._current.rpartition(".")
        known = [n.rpartition(".")[2] for n in self._expected if n.rpartition(".")[0] == layer]
        if self._current and known and kind not in known:
            complaint = (
                f"the layer has no {kind}, only {sorted(known)}: quantization_config in "
                f"config.json describes another format, or leaves this layer unquantised"
            )
        elif isinstance(error, AssertionError) and not complaint:  # as loaders assert shapes
            complaint = "its shape does not fit config.json"
        return self._position + complaint


def sample_numbers(weight: torch.Tensor) -> torch.Tensor:
    """Returns at most 256 numbers from everywhere in `weight`, as bytes: a copy."""
    numbers = weight.reshape(-1)
    return numbers[:: max(1, len(numbers) // 128)].clone().view(torch.uint8)


SCALES = {
    *("weight_scale", "weight_scale_2", "weight_global_scale"),
    *("input_scale", "input_global_scale", "k_scale", "v_scale"),
}
"""The last parts of the names of scales in checkpoints."""


def describe_wrong_numbers(kind: str, tensor: torch.Tensor) -> str | None:
    """Returns what to say of a checkpoint's tensor that holds NaN or infinity, and of scales that
    are not positive. `kind`: the last part of its name. Returns None for others, and for tensors on
    the meta device. The smallest and the largest number show that many times faster than a look at
    each."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    if kind in _CLIPPING_BOUNDS:
        return None
    must_be_positive = kind in SCALES
    if tensor.dtype == torch.float8_e4m3fn:
        # As an unsigned byte, NaN is the largest number with its sign. As a signed one, it is the
        # largest without, and negative numbers are negative.
        unsigned, signed = tensor.view(torch.uint8), tensor.view(torch.int8)
        is_right = unsigned.max() < 0xFF and signed.max() < 0x7F
        is_right = is_right and (not must_be_positive or signed.min() > 0)
    else:
        # Both are NaN if one number is.
        smallest, largest = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax()
        is_right = smallest.isfinite() and largest.isfinite()
        is_right = is_right and (not must_be_positive or smallest > 0)
    if is_right:
        return None
    numbers = tensor.float()
    wrong = ~numbers.isfinite() | (must_be_positive & (numbers <= 0))
    first = numbers[wrong][0].item()
    if must_be_positive:
        return f"it must only hold positive finite numbers, got {first}"
    return (
        f"its numbers must be finite, got {int(wrong.sum())} of {tensor.numel()} that are not, the "
        f"first {first}"
    )
