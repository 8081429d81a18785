"""Serves a target, alone and with its drafter, and writes what came out as JSON. Run by
`test_serving.py`.

Arguments: a JSON file that says what to serve, and the file to write. Each run is an engine of its
own; of each request are written its tokens, the drafts that it was proposed, one list a step, and
how many tokens each verification emitted, behind which token of the answer it began, of how many
drafts, and how many tokens the prefix cache held; of each group of caches, its sliding window.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


class Recorder:
    """Listens to the scheduler and the speculator of an engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self.drafts: dict[str, list[list[int]]] = {}
        self.emitted: dict[str, list[int]] = {}
        self.verified: dict[str, list[tuple[int, int]]] = {}
        core = llm.llm_engine.engine_core.engine_core
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        self.windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
        self._listen(core.scheduler, core.model_executor.driver_worker.worker.model_runner)

    def _listen(self, scheduler: Any, runner: Any) -> None:
        propose, verified = runner.speculator.propose, scheduler.drafts_verified

        def record_drafts(batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = propose(batch, *args, **kwargs)
            ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens
            for row, request_id in enumerate(batch.req_ids):
                if ends[row] >= batch.prefill_len_np[row]:
                    self.drafts.setdefault(name(request_id), []).append(drafts[row].tolist())
            return drafts

        def record_lengths(request_id: str, num_drafts: int, num_accepted: int) -> None:
            self.emitted.setdefault(name(request_id), []).append(num_accepted + 1)
            anchor = scheduler.requests[request_id].num_output_tokens - 1
            self.verified.setdefault(name(request_id), []).append((anchor, num_drafts))
            verified(request_id, num_drafts, num_accepted)

        runner.speculator.propose = record_drafts
        scheduler.drafts_verified = record_lengths


def name(request_id: str) -> str:
    """Inside the engine a request's id carries a random suffix."""
    return request_id.rpartition("-")[0]


def serve(asked: dict[str, Any]) -> dict[str, Any]:
    gc.freeze()  # vLLM looks for garbage eight times a start; none of what was imported is
    options = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,  # longer prompts are prefilled in chunks
        "kv_cache_memory_bytes": 256 << 20,
        "enforce_eager": True,
        "dtype": "float32",
    }
    llm = LLM(**options | asked["engine"])
    recorder = Recorder(llm) if "speculative_config" in asked["engine"] else None
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    sampling = asked["sampling"]  # of all, or one for each
    by_prompt = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    params = [SamplingParams(detokenize=False, **each) for each in by_prompt]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    if recorder is not None:
        ids = [output.request_id for output in outputs]
        found["drafts"] = [recorder.drafts.get(i, []) for i in ids]
        found["windows"] = recorder.windows
        found["cached"] = [output.num_cached_tokens for output in outputs]
        found["emitted"] = [recorder.emitted.get(i, []) for i in ids]
        found["verified"] = [recorder.verified.get(i, []) for i in ids]
    return found


def main(asked: str, written: str) -> None:
    results = {}
    for run, what in json.loads(Path(asked).read_text()).items():
        results[run] = serve(what)
        cleanup_dist_env_and_memory()
    Path(written).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
