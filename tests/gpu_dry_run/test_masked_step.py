"""A step of masked canvases on a GPU: the host waits for nothing, in every mode."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from tests.gpu_dry_run.fake_cuda import CUDA, FakeCuda
from tests.gpu_dry_run.test_step import PROMPT, C, H, R, config
from tests.unit.step.test_logits import Model
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.requests.options import RequestOptions, server_defaults
from vllm_dllm.step.masked.masked_state import CausalModelState
from vllm_dllm.step.runner import model_state

V = 1_000
NEMOTRON = "NemotronLabsDiffusionModel"
MODES = ("diffusion", "self_speculation", "autoregressive")
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "early stops": {"min_tokens": 5, "stop_token_ids": [7, 8]},
    "log-probabilities": {"logprobs": 5},
}


class Server:
    """What vLLM's runner has of a masked model on a GPU, as far as steps go."""

    def __init__(self, joins_commits: bool) -> None:
        self.joins_commits = joins_commits
        self.req_states = RequestState(R, 512, 4096, C, V, CUDA)
        stock = SimpleNamespace(
            req_states=self.req_states,
            sampling_states=SamplingStates(R, V),
            logprobs_mode="raw_logprobs",
        )
        state = CausalModelState.__new__(CausalModelState)
        state.vllm_config, state.device = config(V, torch.float32, {}), CUDA
        state.model_config = state.vllm_config.model_config
        state.model_config.architecture = NEMOTRON
        state.model_config.hf_config = SimpleNamespace(mask_token_id=100)
        state.model_config.model = "a test's"
        state.model = Model(torch.empty(V, H, device=CUDA))
        state.model.streams_vocabulary = False
        state.max_num_tokens, state.max_num_reqs, state._latest_metadata = 4096, R, None
        state._causal = torch.zeros(2 * R, dtype=torch.int32, device=CUDA)
        state._symmetric = torch.zeros_like(state._causal)
        self.state, (self.sampler, _) = state, state.custom_sampler(stock)
        self.widths: dict[str, int] = {}

    def admit(self, req_id: str, mode: str, **asked: Any) -> None:
        defaults = server_defaults({}, FAMILIES[NEMOTRON])
        self.widths[req_id] = 1 if mode == "autoregressive" else C
        made = SamplingParams(**{"max_tokens": 100, "temperature": 1.0} | asked)
        made._all_stop_token_ids = set(asked.get("stop_token_ids", ()))
        RequestOptions(
            **defaults,
            mode=mode,
            canvas_length=self.widths[req_id] if mode == "autoregressive" else None,
            joins_commits=self.joins_commits,
            is_counted=True,
        ).store_in(made)
        self.req_states.add_request(req_id, PROMPT, list(range(PROMPT)), 0, 100)
        self.sampler.add_request(self.req_states.req_id_to_index[req_id], made)
        self.req_states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def step(self, rows: dict[str, int], *, prefills: bool) -> None:
        batch = self._batch(rows, prefills)
        self.state.prepare_inputs(batch, self.req_states)
        self.state.prepare_attn(batch, CUDAGraphMode.NONE, (), None, [], None)
        self.sampler(torch.empty(len(batch.logits_indices), V, device=CUDA), batch)

    def _batch(self, rows: dict[str, int], prefills: bool) -> Any:
        lengths = np.array(list(rows.values()), dtype=np.int32)
        slots = np.array([self.req_states.req_id_to_index[one] for one in rows], dtype=np.int32)
        canvases = np.zeros_like(lengths) if prefills else lengths
        ends, canvas_ends = (
            np.concatenate(([0], np.cumsum(n))).astype(np.int32) for n in (lengths, canvases)
        )
        total = int(ends[-1])

        def on_device(shape: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=CUDA)

        return SimpleNamespace(
            req_ids=list(rows),
            num_reqs=len(rows),
            num_tokens=total,
            num_tokens_after_padding=total,
            num_draft_tokens=int(canvas_ends[-1]),
            num_draft_tokens_per_req=canvases,
            num_scheduled_tokens=lengths,
            is_prefilling_np=np.full(len(rows), prefills),
            has_prefill=prefills,
            max_query_len=int(lengths.max()),
            cu_num_logits_np=canvas_ends,
            query_start_loc_np=ends,
            query_start_loc=on_device(ends.shape),
            seq_lens=on_device(lengths.shape),
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths if prefills else PROMPT + lengths),
            prefill_len_np=np.full(len(rows), PROMPT, dtype=np.int32),
            idx_mapping_np=slots,
            idx_mapping=on_device(slots.shape),
            logits_indices=on_device(int(canvas_ends[-1]), torch.int64),
            input_ids=on_device(total, torch.int64),
        )


@pytest.mark.parametrize("joins_commits", [True, False], ids=["joins", "runs ahead"])
@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), MODES], ids="-".join)
def test_nobody_waits(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...], joins_commits: bool
) -> None:
    """With every kind of request in every mode, from the end of its prompt on."""
    monkeypatch.setattr(model_state, "build_attn_metadata", lambda **kwargs: kwargs)
    server = Server(joins_commits)
    for log in (cuda.waits, cuda.copies, cuda.launches):
        log.clear()
    for mode in modes:
        for kind, asked in REQUESTS.items():
            server.admit(f"{mode}, {kind}", mode, **asked)
    server.step(dict.fromkeys(server.widths, PROMPT), prefills=True)
    for _ in range(3):
        server.step(server.widths, prefills=False)
    assert cuda.waits == []
    cuda.copies.clear()
    server.step({req_id: n for req_id, n in server.widths.items() if "g" in req_id}, prefills=False)
    assert cuda.waits == []
