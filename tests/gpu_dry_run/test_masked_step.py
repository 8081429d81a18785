"""A step of masked canvases on a GPU: the host waits for nothing, in every mode, and once where
drafts have grammars. Steps that verify drafts launch no more than they did."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import StructuredOutputsParams

from tests.gpu_dry_run.fake_cuda import CUDA, FakeCuda
from tests.gpu_dry_run.test_step import PROMPT, C, H, config, input_batch, place
from tests.unit.step.batches import Model
from tests.unit.step.worker import params
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.requests.options import server_defaults
from vllm_dllm.step.asked.grammars import CanvasGrammars
from vllm_dllm.step.masked.masked_state import state_class

V = 1_000
NEMOTRON = "NemotronLabsDiffusionModel"
FAST_DLLM = "Fast_dLLM_QwenForCausalLM"
SDAR = "SDARForCausalLM"
MODES = ("diffusion", "self_speculation", "autoregressive")
RULES = ("confidence", "verified")
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "early stops": {"min_tokens": 5, "stop_token_ids": [7, 8]},
    "log-probabilities": {"logprobs": 5},
}
MOST = {FAST_DLLM: 200, SDAR: 254}
"""What a step of one request with verified drafts launched when this was written, without a grammar
to look at."""


class Server:
    """What vLLM's runner has of a masked model on a GPU, as far as steps go."""

    def __init__(
        self, joins_commits: bool, architecture: str = NEMOTRON, runs_fa4: bool = False
    ) -> None:
        self.joins_commits, self.family = joins_commits, FAMILIES[architecture]
        vllm_config = config(vocab_size=V, architecture=architecture)
        if architecture == SDAR:  # a block and its copy are a canvas
            vllm_config.additional_config = {"vllm_dllm": {"blocks_in_flight": 2}}
        model = Model(torch.empty(V, H, device=CUDA))
        model.streams_vocabulary = False
        state_cls = state_class(self.family)
        self.state = state_cls.__new__(state_cls)
        # Of those whose blocks see themselves.
        spans = torch.zeros(4096, 2, dtype=torch.int32, device=CUDA)
        self.state._block_spans = spans if runs_fa4 else None
        self.sampler, self.req_states = place(self.state, vllm_config, model)
        self.widths: dict[str, int] = {}

    def admit(self, req_id: str, mode: str, **asked: Any) -> None:
        """`mode`: Nemotron's, or a rule of acceptance."""
        self.widths[req_id] = 1 if mode == "autoregressive" else C
        carried = {
            **server_defaults({}, self.family),
            **({"mode": mode} if mode in MODES else {"acceptance": mode}),
            "canvas_length": 1 if mode == "autoregressive" else None,
            "joins_commits": self.joins_commits,
            "is_counted": True,
        }
        made = params(carried=carried, **{"max_tokens": 100, "seed": None} | asked)
        self.req_states.add_request(req_id, PROMPT, list(range(PROMPT)), 0, 100)
        self.sampler.add_request(self.req_states.req_id_to_index[req_id], made)
        self.req_states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def step(self, rows: dict[str, int], *, prefills: bool) -> None:
        batch = input_batch(rows, self.req_states, prefills=prefills)
        self.state.prepare_inputs(batch, self.req_states)
        self.state.prepare_attn(batch, CUDAGraphMode.NONE, (), None, [], None)
        self.sampler(torch.empty(len(batch.logits_indices), V, device=CUDA), batch)


@pytest.mark.parametrize("joins_commits", [True, False], ids=["joins", "runs ahead"])
@pytest.mark.parametrize(
    ("architecture", "modes", "runs_fa4"),
    [
        *((NEMOTRON, modes, False) for modes in (*((mode,) for mode in MODES), MODES)),
        *((name, RULES, runs_fa4) for name in (FAST_DLLM, SDAR) for runs_fa4 in (False, True)),
    ],
)
def test_nobody_waits(
    cuda: FakeCuda, architecture: str, modes: tuple[str, ...], runs_fa4: bool, joins_commits: bool
) -> None:
    server = Server(joins_commits, architecture, runs_fa4)
    cuda.forget()
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


@pytest.mark.parametrize("architecture", MOST)
def test_a_verified_step_launches_no_more_than_it_did(cuda: FakeCuda, architecture: str) -> None:
    server = Server(True, architecture)
    server.admit("plain", "verified")
    server.step({"plain": PROMPT}, prefills=True)
    server.step(server.widths, prefills=False)
    cuda.launches.clear()
    server.step(server.widths, prefills=False)
    assert len(cuda.launches) <= MOST[architecture], Counter(cuda.launches).most_common()


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [(NEMOTRON, "self_speculation"), (FAST_DLLM, "verified"), (SDAR, "verified")],
)
def test_grammars_of_drafts_are_read_in_one_copy(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, architecture: str, mode: str
) -> None:
    """Where no token is chosen: each row that a grammar chooses from is one more."""
    state = SimpleNamespace(has_ended=True, plan=None)
    monkeypatch.setattr(CanvasGrammars, "_compile", lambda *_: state)
    server = Server(True, architecture)
    for req_id in ("one", "another"):
        server.admit(req_id, mode, structured_outputs=StructuredOutputsParams(regex="a"))
    server.step(dict.fromkeys(server.widths, PROMPT), prefills=True)
    for _ in range(2):
        cuda.forget()
        server.step(server.widths, prefills=False)
        (wait,) = cuda.waits
        assert wait.startswith("a copy to the host at vllm_dllm/step/asked/grammar_runs.py")
