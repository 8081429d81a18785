"""Serves a tiny ordinary model and prints what came out as JSON. Run by `test_neighbours.py`.

Arguments: the checkpoint, then one word a run, `v2`: the model runner asked for, or `default`:
whatever vLLM chooses.
"""

import json
import os
import sys
from collections.abc import Iterator

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PROMPTS = [[(7 * i + 3 * j) % 128 for j in range(5 + 30 * i)] for i in range(3)]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}
SAMPLING = {
    "greedy": SamplingParams(**GREEDY),
    "penalised": SamplingParams(**GREEDY, repetition_penalty=1.3, presence_penalty=0.5),
}


def describe(llm: LLM) -> Iterator[tuple[str, object]]:
    """What the extension could have changed in this process."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker import block_table
    from vllm.v1.worker.gpu import input_batch

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    yield "worker", f"{type(worker).__module__}.{type(worker).__name__}"
    yield "runner", f"{type(worker.model_runner).__module__}"
    yield "has_triton", HAS_TRITON
    yield "runner v2 kernel", type(input_batch._post_update_kernel).__name__
    yield "runner v1 kernel", type(block_table.ComputeSlotMappingKernel.kernel).__name__
    yield "waiting threads", os.environ.get("GOMP_SPINCOUNT")


def serve(checkpoint: str) -> dict[str, object]:
    llm = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,  # the longer prompts are prefilled in chunks
        kv_cache_memory_bytes=16 << 20,
        enforce_eager=True,
        dtype="float32",
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    tokens = {
        name: [
            list(output.outputs[0].token_ids)
            for output in llm.generate(prompts, sampling, use_tqdm=False)
        ]
        for name, sampling in SAMPLING.items()
    }
    return {"tokens": tokens, "process": dict(describe(llm))}


def main(checkpoint: str, *runs: str) -> None:
    results = {}
    for run in runs:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        if run == "v2":
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        results[run] = serve(checkpoint)
        cleanup_dist_env_and_memory()
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
