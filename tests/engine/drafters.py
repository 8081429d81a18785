"""Serves a target, alone and with its drafter, by engines in the tests' process."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.engine.conftest import tokens_of
from tests.engines import asynchronous_scheduling, in_this_process
from tests.paths import CHECKPOINTS

TARGET, DRAFTER = CHECKPOINTS / "qwen3-tiny-target", CHECKPOINTS / "qwen3-tiny-dflash"


def make_dflash2(path: Path) -> Path:
    """The shipped drafter's layers, and random ones of DFlash2's own."""
    config = json.loads((DRAFTER / "config.json").read_text())
    hidden, vocabulary, taps, group, rank = config["hidden_size"], config["vocab_size"], 3, 16, 8
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": 4,
    }
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return (0.1 * torch.randn(shape, generator=generator)).bfloat16()

    weights = load_file(DRAFTER / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for conv in (f"layers.{layer}.attention_conv", f"layers.{layer}.mlp_conv"):
            weights[f"{conv}.base_kernel"] = drawn(2, taps, hidden)
            weights[f"{conv}.base_kernel"][:, 0] += 1.0
            weights[f"{conv}.kernel_projection.weight"] = drawn(2 * taps * hidden // group, hidden)
    weights["candidate_selector.predecessor_codebook"] = drawn(vocabulary, rank)
    weights["candidate_selector.successor_codebook"] = drawn(vocabulary, rank)
    weights["candidate_selector.hidden_projection.weight"] = drawn(rank, hidden)
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


WIDTH = 15
ALONE = {"model": str(TARGET), "max_model_len": 1024}


def drafting(settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Options of an engine; `settings` are our drafter's."""
    speculative = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": WIDTH}
    found = ALONE | {"speculative_config": speculative | options.pop("speculative", {})}
    if settings is not None:
        found["additional_config"] = {"vllm_dllm": {"drafter": settings}}
    return found | options


class Recorder:
    """Listens to the scheduler of an engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self.emitted: dict[str, list[int]] = {}
        self.verified: dict[str, list[tuple[int, int]]] = {}
        core = llm.llm_engine.engine_core.engine_core
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        self.windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
        self._listen(core.scheduler)

    def _listen(self, scheduler: Any) -> None:
        verified = scheduler.drafts_verified

        def record_lengths(request_id: str, num_drafts: int, num_accepted: int) -> None:
            self.emitted.setdefault(name(request_id), []).append(num_accepted + 1)
            anchor = scheduler.requests[request_id].num_output_tokens - 1
            self.verified.setdefault(name(request_id), []).append((anchor, num_drafts))
            verified(request_id, num_drafts, num_accepted)

        scheduler.drafts_verified = record_lengths


def name(request_id: str) -> str:
    """Inside the engine a request's id carries a random suffix."""
    return request_id.rpartition("-")[0]


@dataclass
class Served:
    """Of each request: its tokens, and with a drafter how many tokens each verification emitted,
    behind which token of the answer it began and of how many drafts, and how many tokens the prefix
    cache held. Of each group of caches, its sliding window."""

    tokens: list[list[int]]
    is_asynchronous: bool  # steps were scheduled ahead of the last one's tokens
    emitted: list[list[int]] = field(default_factory=list)
    verified: list[list[tuple[int, int]]] = field(default_factory=list)
    cached: list[int | None] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)


Sampling = dict[str, Any] | list[dict[str, Any]]
"""Of all requests, or one for each."""


def serve(engine: dict[str, Any], prompts: list[list[int]], sampling: Sampling) -> Served:
    with started(engine) as llm:
        return ask(llm, prompts, sampling)


@contextmanager
def started(engine: dict[str, Any]) -> Iterator[LLM]:
    options = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,  # longer prompts are prefilled in chunks
        "kv_cache_memory_bytes": 256 << 20,
        "enforce_eager": True,
        "dtype": "float32",
    }
    with ExitStack() as stack:
        stack.enter_context(in_this_process())
        if engine.get("async_scheduling"):
            stack.enter_context(asynchronous_scheduling())
        llm = LLM(**options | engine)
        stack.callback(llm.llm_engine.engine_core.shutdown)
        yield llm


def ask(llm: LLM, prompts: list[list[int]], sampling: Sampling) -> Served:
    recorder = Recorder(llm) if llm.llm_engine.vllm_config.speculative_config else None
    by_prompt = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    params = [SamplingParams(detokenize=False, **each) for each in by_prompt]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    config = llm.llm_engine.vllm_config.scheduler_config
    found = Served(list(map(tokens_of, outputs)), config.async_scheduling)
    if recorder is not None:
        ids = [output.request_id for output in outputs]
        found.windows = recorder.windows
        found.cached = [output.num_cached_tokens for output in outputs]
        found.emitted = [recorder.emitted.get(i, []) for i in ids]
        found.verified = [recorder.verified.get(i, []) for i in ids]
    return found
