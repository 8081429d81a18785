"""What a captured graph reads is what its step has written: before each replay, the same forward is
run without the graph, and must read no memory that the graph does not."""

import sys
from typing import Any

from tests.cuda_build.device import GpuDevice


def compare(device: GpuDevice, runner: Any) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    replay = ModelCudaGraphManager.run_fullgraph

    def compare_and_replay(manager: Any, desc: Any) -> Any:
        step = sys._getframe(1).f_locals  # of `execute_model`, which passes a replay nothing
        logs = (device.waits, device.copies, device.launches)
        lengths = [len(log) for log in logs]
        with (
            device.watching() as eager,
            set_forward_context(
                step["attn_metadata"],
                runner.vllm_config,
                num_tokens=desc.num_tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=step["slot_mappings_by_layer"],
                is_padding=step["input_batch"].is_padding,
            ),
        ):
            runner.model(**step["model_inputs"])
        for log, length in zip(logs, lengths, strict=True):
            del log[length:]
        captured = manager.graphs[desc].memory.read
        others = [at for storage, (_, at) in eager.read.items() if storage not in captured]
        if others:
            device.forbidden.append(f"a step reads memory that its graph does not: {others}")
        return replay(manager, desc)

    ModelCudaGraphManager.run_fullgraph = compare_and_replay
