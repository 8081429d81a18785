"""Serves the shipped checkpoint with the attention of CPUs and with that of GPUs, the Triton kernel
in the interpreter, and prints what came out as JSON. Run by `test_gpu_attention.py`.

Arguments: the checkpoint and the number of held-out prompts.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tests.engine.rounding import decided
from tests.triton_version import interpreted_without_gpu
from vllm_dllm.attention import GPU_BACKEND
from vllm_dllm.compat import attention as vllm_attention


def serve_on_gpu_path() -> None:
    """Layers of engines built from here on attend as on a GPU."""
    original = vllm_attention.override_cpu_attention_backend
    vllm_attention.override_cpu_attention_backend = lambda class_path: original(GPU_BACKEND)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # vLLM's write to the cache asks


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def answers(
    checkpoint: str, prompts: list[list[dict[str, str]]], knows_rounding: bool = False
) -> dict[str, object]:
    """With `knows_rounding`, None where that decides."""
    llm = LLM(checkpoint, dtype="float32", max_model_len=1024, max_num_seqs=4, enforce_eager=True)
    params = [SamplingParams(max_tokens=256, seed=number) for number in range(len(prompts))]
    chat = partial(llm.chat, prompts, params, use_tqdm=False)
    outputs = decided(llm, chat, tokens_of) if knows_rounding else chat()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    found = {
        "attention": sorted(
            {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}
        ),
        "tokens": [output and tokens_of(output) for output in outputs],
        "texts": [output and output.outputs[0].text for output in outputs],
    }
    del llm, worker, layers, chat
    cleanup_dist_env_and_memory()
    return found


def main(checkpoint: str, count: str) -> None:
    lines = (Path(checkpoint).parent / "held_out.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // int(count)]]
    prompts = [row["messages"] for row in rows]
    on_cpu = answers(checkpoint, prompts, knows_rounding=True)
    interpreted_without_gpu()
    serve_on_gpu_path()
    on_gpu = answers(checkpoint, prompts)
    right = [row["answer"] for row in rows]
    print("RESULT", json.dumps({"cpu": on_cpu, "gpu": on_gpu, "right": right}))


if __name__ == "__main__":
    main(*sys.argv[1:])
