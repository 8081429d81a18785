"""Starts a compiled engine in this process and prints what it compiled, what it loaded and what it
answered, as JSON. Run by `test_warm_start.py` with the checkpoint as its argument."""

import json
import sys

from torch._dynamo.utils import counters
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter


def main(checkpoint: str) -> None:
    llm = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        kv_cache_memory_bytes=16 << 20,
    )
    asked = SamplingParams(max_tokens=32, seed=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate({"prompt_token_ids": list(range(10, 30))}, asked, use_tqdm=False)
    result = {
        "compiled": compilation_counter.num_aot_compiles,
        "traced": counters["stats"]["unique_graphs"],
        "loaded": compilation_counter.num_aot_artifacts_loaded,
        "answer": list(outputs[0].outputs[0].token_ids),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
