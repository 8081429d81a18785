"""How much memory the served weights take, asked of the workers themselves.

`vllm serve --worker-extension-cls vllm_dllm.tools.evaluate.weight_sizes.WeightSizes` adds the
method to each worker; `/collective_rpc` calls it.
"""

from typing import Any

from vllm.model_executor.layers.linear import LinearBase


class WeightSizes:
    model_runner: Any  # the worker's

    def weight_sizes(self) -> dict[str, int]:
        """Counts the bytes of this worker's parameters, tied ones once. Tables computed from the
        configuration (rotary embeddings) are not weights."""
        stored: dict[int, int] = {}
        packed = 0
        for module in self.model_runner.model.modules():
            for parameter in module.parameters(recurse=False):
                storage = parameter.untyped_storage()
                stored[storage.data_ptr()] = storage.nbytes()
            weight = getattr(module, "weight", None)
            if isinstance(module, LinearBase) and weight is not None and weight.numel() == 0:
                # A CPU kernel keeps the only copy, in its own layout and the same type.
                num_rows = getattr(module, "output_size_per_partition", module.output_size)
                num_columns = getattr(module, "input_size_per_partition", module.input_size)
                packed += num_rows * num_columns * weight.itemsize
        return {"bytes": sum(stored.values()) + packed}
