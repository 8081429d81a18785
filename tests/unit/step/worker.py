"""A worker without an engine: vLLM's own request states and our step and sampler, which are given
what a model says of each row. Positions are counted as vLLM's runner counts them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from tests.paths import CHECKPOINTS
from tests.unit.step.batches import Model
from vllm_dllm.config.architectures import FAMILIES, Family, family_of
from vllm_dllm.requests.options import parse_keys, server_defaults
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.runner.sampler import DiffusionSampler
from vllm_dllm.step.uniform.uniform_step import UniformStep

V, C, H, R, CONTEXT = 512, 4, 8, 4, 64
MASK, EOS = 500, 1
CPU = torch.device("cpu")
GEMMA = "DiffusionGemmaForBlockDiffusion"
GENERATION = {
    "max_denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
}


def config(
    vocab_size: int = V,
    hidden_size: int = H,
    canvas_length: int = C,
    context: int = CONTEXT,
    architecture: str = GEMMA,
    dtype: torch.dtype = torch.float32,
    num_workers: int = 1,  # that share the model
    settings: Mapping[str, Any] | None = None,
    says: Mapping[str, Any] | None = None,  # of the checkpoint's config.json
) -> Any:
    """vLLM's, as far as a step reads it."""
    return SimpleNamespace(
        additional_config={"vllm_dllm": settings or {}},
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(
            rank=0, tensor_parallel_size=num_workers, worker_cls="", prefill_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        diffusion_config=SimpleNamespace(canvas_length=canvas_length, max_denoising_steps=None),
        structured_outputs_config=StructuredOutputsConfig(),
        model_config=SimpleNamespace(
            architecture=architecture,
            get_vocab_size=lambda: vocab_size,
            max_model_len=context,
            dtype=dtype,
            enable_cumem_allocator=False,
            hf_config=SimpleNamespace(mask_token_id=MASK, **_fixed(architecture), **says or {}),
            hf_text_config=SimpleNamespace(hidden_size=hidden_size),
            try_get_generation_config=lambda: GENERATION,
            override_generation_config={},
            model="a test's",
            skip_tokenizer_init=False,
            tokenizer=str(CHECKPOINTS / "diffusiongemma-tiny"),
            runner_type="generate",
            tokenizer_mode="auto",
            tokenizer_revision=None,
            trust_remote_code=False,
        ),
    )


def _fixed(architecture: str) -> Mapping[str, Any]:
    return FAMILIES[architecture].fixed if architecture in FAMILIES else {}


def params(
    family: Family | None = None, carried: Mapping[str, Any] | None = None, **asked: Any
) -> SamplingParams:
    """Of an admitted request; `carried` is what the scheduler adds to its options."""
    extra = {name: asked.pop(name) for name in list(asked) if name.startswith("diffusion_")}
    words, eos = asked.pop("bad_words", None), asked.pop("eos", None)
    made = SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "seed": 0} | asked)
    options = parse_keys(extra, server_defaults({}, family), family)
    replace(options, **carried or {}).store_in(made)
    made._bad_words_token_ids, made._eos_token_id = words, eos
    if eos is not None:
        made._all_stop_token_ids.add(eos)
    return made


def sure(tokens: Sequence[int], nats: float = 30.0) -> torch.Tensor:
    """[L, V] fp32: logits of a model that has no doubt of `tokens`."""
    logits = torch.zeros(len(tokens), V)
    logits[range(len(tokens)), list(tokens)] = nats
    return logits


def noise(length: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """[length, V] fp32: logits of one that knows nothing."""
    return scale * torch.randn(length, V, generator=torch.Generator().manual_seed(seed))


class Step(NamedTuple):
    """What a step made of its requests, by id."""

    emitted: dict[str, list[int]]
    rejected: dict[str, int]  # rows that are computed again
    logprobs: LogprobsTensors | None


@dataclass
class Request:
    params: SamplingParams
    prompt_len: int
    tokens: list[int]  # prompt and answer
    computed: int  # tokens that have keys and values for good


class Worker:
    def __init__(
        self,
        step_cls: type[CanvasStep] = UniformStep,
        architecture: str = GEMMA,
        joins_commits: bool = True,
        logprobs_mode: str = "raw_logprobs",
        canvas_length: int = C,
        **of_config: Any,
    ) -> None:
        self.joins_commits = joins_commits
        made = config(architecture=architecture, canvas_length=canvas_length, **of_config)
        self.family = family_of(architecture, made.model_config.hf_config)
        self.req_states = RequestState(
            R, made.model_config.max_model_len, 4096, canvas_length, V, CPU
        )
        stock = SimpleNamespace(
            req_states=self.req_states,
            sampling_states=SamplingStates(R, V),
            logprobs_mode=logprobs_mode,
        )
        model = Model(torch.randn(V, H, generator=torch.Generator().manual_seed(0)))
        self.stepping = step_cls(made, model, stock, CPU)
        self.sampler = DiffusionSampler(self.stepping, R * canvas_length)
        self.asked, self.slots = self.stepping.requests, self.stepping.slots
        self.requests: dict[str, Request] = {}

    def slot(self, req_id: str) -> int:
        return self.req_states.req_id_to_index[req_id]

    def canvas(self, req_id: str) -> list[int]:
        """What its next forward reads."""
        return self.slots.canvas[self.slot(req_id)].tolist()

    def answer(self, req_id: str) -> list[int]:
        request = self.requests[req_id]
        return request.tokens[request.prompt_len :]

    def admit(
        self, req_id: str, prompt: int = C, computed: int | None = None, **asked: Any
    ) -> "Worker":
        """Returns itself. `computed`: tokens of the prompt; None: all."""
        carried = {"joins_commits": self.joins_commits, **asked.pop("carried", {})}
        made = params(self.family, carried, **asked)
        computed = prompt if computed is None else computed
        self.requests[req_id] = Request(made, prompt, list(range(10, 10 + prompt)), computed)
        self.place(req_id)
        return self

    def place(self, req_id: str) -> None:
        """Gives it a slot."""
        request = self.requests[req_id]
        most = request.params.max_tokens
        self.req_states.add_request(req_id, request.prompt_len, request.tokens, 0, most)
        self.sampler.add_request(self.slot(req_id), request.params)
        self.req_states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def leave(self, req_id: str) -> None:
        """For good, or until it gets a `place`."""
        self.asked.remove_request(self.slot(req_id))
        self.req_states.remove_request(req_id)

    def step(self, says: Mapping[str, torch.Tensor], late: int = 0) -> Step:
        """One step of these requests, each with as many rows as the model says something of
        [rows, V]: known tokens first, and then the canvas. `late`: tokens more than there are that
        the scheduler may know of."""
        batch = self._batch({req_id: len(rows) for req_id, rows in says.items()}, late)
        self.stepping.begin_step(batch)
        out = self.sampler(torch.cat(list(says.values()))[batch.logits_indices], batch)
        rejected = dict(zip(says, out.num_rejected.tolist(), strict=True))
        step = Step({}, rejected, out.logprobs_tensors)
        for i, req_id in enumerate(says):
            request = self.requests[req_id]
            tokens = out.sampled_token_ids[i, : out.num_sampled[i]].tolist()
            first = len(request.tokens)
            written = self.req_states.all_token_ids.gpu[self.slot(req_id)]
            written[first : first + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            request.tokens += tokens
            request.computed += len(says[req_id]) - rejected[req_id]
            step.emitted[req_id] = tokens
        return step

    def _batch(self, rows: dict[str, int], late: int) -> Any:
        requests = [self.requests[req_id] for req_id in rows]
        slots = np.array([self.slot(req_id) for req_id in rows])
        if self.joins_commits:
            self.req_states.prefill_len.np[slots] = [len(one.tokens) for one in requests]
        computed = np.array([one.computed for one in requests])
        lengths = np.array(list(rows.values()))
        known = np.minimum([len(one.tokens) for one in requests] - computed, lengths)
        canvases = lengths - known
        ends, canvas_ends = (np.concatenate(([0], np.cumsum(n))) for n in (lengths, canvases))
        indices = [np.arange(end - n, end) for end, n in zip(ends[1:], canvases, strict=True)]
        prefill_len = self.req_states.prefill_len.np[slots]
        return SimpleNamespace(
            req_ids=list(rows),
            num_reqs=len(rows),
            num_draft_tokens=int(canvas_ends[-1]),
            num_draft_tokens_per_req=canvases,
            query_start_loc_np=ends,
            cu_num_logits_np=canvas_ends,
            logits_indices=torch.from_numpy(np.concatenate(indices)),
            seq_lens=torch.from_numpy(computed + lengths).int(),
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + lengths + late).int(),
            idx_mapping_np=slots,
            prefill_len_np=prefill_len,
            is_prefilling_np=computed < prefill_len,
        )


GetWorker = Callable[..., Worker]
