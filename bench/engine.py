"""Drives an offline vLLM engine, ours or stock, with a fixed number of requests in flight."""

import time
from typing import Any

from bench.step_split import split_parts

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64


class Engine:
    """An fp32 engine with otherwise default settings, in vLLM's default process layout."""

    counters = ""
    """Prefix of the vLLM counters that a run reports."""

    def __init__(self, checkpoint: str, **options: Any) -> None:
        from vllm import LLM

        defaults: dict[str, Any] = dict(
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            kv_cache_memory_bytes=1 << 30,
            # As `vllm serve` has it; the counters come with it.
            disable_log_stats=False,
            # Each prompt is sent once per round, so rounds after the first would skip prefills.
            enable_prefix_caching=False,
            worker_extension_cls="bench.step_split.StepSplit",
        )
        self.llm = LLM(checkpoint, **defaults | options)
        self._num_requests = 0

    def run(
        self, prompts: list[list[int]], batch: int, max_tokens: int, **sampling: Any
    ) -> dict[str, Any]:
        """Decodes `prompts`, `batch` of them at any time; a new one starts as soon as one ends."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, **sampling
        )
        engine = self.llm.llm_engine
        outputs: list[list[int]] = [[] for _ in prompts]
        counters = self._counters()
        forwards = self._num_forwards()
        sent = finished = 0
        indices: dict[str, int] = {}
        sent_at, waited = [0.0] * len(prompts), [0.0] * len(prompts)
        started = time.perf_counter()
        while finished < len(prompts):
            while sent < len(prompts) and sent - finished < batch:
                request_id = str(self._num_requests)
                self._num_requests += 1
                indices[request_id] = sent
                sent_at[sent] = time.perf_counter()
                engine.add_request(request_id, {"prompt_token_ids": prompts[sent]}, params)
                sent += 1
            for output in engine.step():
                i, new_tokens = indices[output.request_id], output.outputs[0].token_ids
                if new_tokens and not outputs[i]:
                    waited[i] = time.perf_counter() - sent_at[i]
                outputs[i] += new_tokens
                finished += output.finished
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "outputs": outputs,
            "forwards": self._num_forwards() - forwards,
            "first_token_seconds": waited,
            "counted": {name: value - counters[name] for name, value in self._counters().items()},
        }

    def split(
        self, prompts: list[list[int]], max_tokens: int, batch: int = 1, **sampling: Any
    ) -> list[dict[str, float]]:
        """The parts of every step, in ms, `batch` prompts decoded at any time."""
        self.llm.collective_rpc("start_split")
        self.run(prompts, batch, max_tokens, **sampling)
        return [self.parts(step) for step in self.llm.collective_rpc("stop_split")[0]]

    def parts(self, step: dict[str, float]) -> dict[str, float]:
        return split_parts(step)

    def _num_forwards(self) -> int:
        """How often the model has run so far; an engine also steps to report ended requests."""
        return self.llm.collective_rpc("num_forwards")[0]

    def _counters(self) -> dict[str, float]:
        """vLLM's own, without the prefix of their names."""
        return {
            metric.name.removeprefix(self.counters): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(self.counters) and hasattr(metric, "value")
        }


class CanvasEngine(Engine):
    """For a diffusion model."""

    counters = "vllm:diffusion_num_"

    def __init__(self, checkpoint: str, canvas_length: int, **options: Any) -> None:
        super().__init__(checkpoint, diffusion_config={"canvas_length": canvas_length}, **options)

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().run(*args, **kwargs)
        counted = found.pop("counted")
        # Canvases of a run all have the same length.
        steps = counted["denoising_steps"]
        blocks = counted["committed_tokens"] * steps / counted["canvas_positions"]
        # The counter also counts a commit as a step.
        return {**found, "steps_per_block": steps / blocks - 1}
