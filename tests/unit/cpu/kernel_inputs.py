"""Random inputs of vLLM's bookkeeping kernels, and the kernels themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from vllm_dllm.compat.version import is_at_least
from vllm_dllm.cpu.kernels import CpuKernel, replace_kernels

RUNNER = "vllm.v1.worker.gpu"
MAX_REQS = 9
MAX_LEN = 64
VOCAB = 50
SINCE_0_33 = is_at_least("0.33")  # some kernels take more
STALE = -7  # what outputs hold before a launch


@dataclass
class KernelInputs:
    grid: tuple[int, ...]
    args: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    # Everything whose contents must be the same afterwards, arguments or reached by address.
    memory: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Batch:
    """A random batch: some requests may have nothing scheduled, slots are in any order."""

    num_reqs: int
    slots: torch.Tensor  # [num_reqs] int64
    query_lens: np.ndarray
    query_start_loc: torch.Tensor  # [MAX_REQS + 1] int32, padded with the number of tokens

    @classmethod
    def draw(cls, rng: np.random.Generator, min_query_len: int = 0) -> "Batch":
        num_reqs = int(rng.integers(1, MAX_REQS + 1))
        query_lens = rng.integers(min_query_len, 12, num_reqs)
        bounds = np.full(MAX_REQS + 1, query_lens.sum())
        bounds[: num_reqs + 1] = np.cumsum([0, *query_lens])
        slots = rng.permutation(MAX_REQS)[:num_reqs]
        return cls(num_reqs, torch.from_numpy(slots), query_lens, int32(bounds))

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


CASES: dict[str, tuple[str, Callable[[np.random.Generator], KernelInputs]]] = {}


def inputs_of(kernel: str, **variants: dict[str, Any]) -> Callable[[Any], Any]:
    """Makes a function that draws inputs of the kernel a case of the function's name, or several,
    one for each of the variants of the function's arguments."""

    def register(draw: Any) -> Any:
        for name, arguments in (variants or {"": {}}).items():
            case = f"{draw.__name__}_{name}" if name else draw.__name__
            CASES[case] = (kernel, partial(draw, **arguments))
        return draw

    return register


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values)).to(torch.int32)


def stale(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, STALE, dtype=dtype)


def tokens(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, VOCAB, shape)).to(dtype)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def kernel_of(name: str) -> CpuKernel:
    module, attribute = f"{RUNNER}.{name}".rsplit(".", 1)
    import_module(module)
    replace_kernels()
    return getattr(import_module(module), attribute)
