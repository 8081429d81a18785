"""What in a step would make the host wait for the device, seen from inside the worker process.

On a CPU nothing waits, but the calls are the same: those that hand a tensor's values to Python, and
operations whose result's shape depends on values.
"""

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__contains__),
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
}
SHAPED_BY_VALUES = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere"),
        *("masked_select", "bincount", "repeat_interleave", "unique_dim", "_unique", "_unique2"),
    )
}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Waits(TorchDispatchMode):
    """Lists them in `found`, each with our line of code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def add(self, name: str) -> None:
        ours = [f for f in traceback.extract_stack() if "/vllm_dllm/" in f.filename]
        where = f"{ours[-1].filename.rpartition('/')[2]}: {ours[-1].line}" if ours else "?"
        self.found.append(f"{name} in {where}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        # A mask as an index is its nonzero places.
        masks = name in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in SHAPED_BY_VALUES or masks:
            self.add(name)
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.waits.add(func.__name__)
        return func(*args, **(kwargs or {}))


class WatchWaits:
    """vLLM mixes this into its worker (`worker_extension_cls`); called with `collective_rpc`."""

    model_runner: Any  # the worker's

    def watch_waits(self) -> None:
        """From now on, in every sampling step and in the preparation of its inputs."""
        self._waits, self._watched, self._patches = Waits(), 0, ExitStack()
        sampler = self.model_runner.sampler
        self._patches.enter_context(
            patch.object(sampler.step.requests.observers, "trace", None)
        )  # copies
        self._watch(type(sampler), "__call__")
        self._watch(type(self.model_runner.model_state), "prepare_inputs")

    def waits(self) -> tuple[int, list[str]]:
        """How many calls were watched until now, and what would have waited."""
        self._patches.close()
        return self._watched, sorted(set(self._waits.found))

    def _watch(self, owner: type, method: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._watched += 1
            with self._waits, Reads(self._waits):
                return inner(*args, **kwargs)

        self._patches.enter_context(patch.object(owner, method, watched))


def waits_during(engine: Any, compute: Callable[[], Any]) -> list[str]:
    """Of an engine with `WATCHED`."""
    engine.llm.collective_rpc("watch_waits")
    compute()
    num_watched, found = engine.llm.collective_rpc("waits")[0]
    assert num_watched > 4
    return found


WATCHED = {"worker_extension_cls": "tests.engine.waits.WatchWaits"}
