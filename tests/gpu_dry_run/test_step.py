"""A denoise step on a GPU: the host waits for nothing, whatever requests ask for but bad words of
several tokens. Nor does it when requests come: what they bring is copied while the host goes on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from tests.gpu_dry_run.fake_cuda import CUDA, FakeCuda
from tests.unit.step import worker
from tests.unit.step.batches import Model
from vllm_dllm.step.runner.model_state import DiffusionModelState
from vllm_dllm.step.runner.sampler import DiffusionSampler
from vllm_dllm.step.watched import observers

R, C, H, PROMPT = 19, 32, 64, 20
VOCABULARIES = {"streamed": 20_000, "whole": 1_000}
CANVAS = list(range(5, 5 + C))
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seeded": {"seed": 3},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {5: 2.0, 6: -1.0}},
    "allowed": {"allowed_token_ids": [1, 2, 3]},
    "early stops": {"min_tokens": 5, "stop_token_ids": [7, 8]},
    "bad words": {"bad_words": [[9], [10]]},
    "log-probabilities": {"logprobs": 5},
    "chosen log-probabilities": {"logprob_token_ids": [4, 5]},
    "narrow": {"diffusion_canvas_length": 16},
    "a canvas of its own": {"diffusion_seed_canvas": CANVAS, "diffusion_pinned": [0, 3]},
    "a prediction": {"diffusion_prediction": CANVAS * 2, "stop_token_ids": [7]},
    "symmetric": {"diffusion_window_rule": "symmetric"},
    "revealing": {"diffusion_acceptance": "top_k", "diffusion_accept_tokens": 2},
    "answer only": {"diffusion_judge_answer_only": True, "stop_token_ids": [7]},
    "under load": {"diffusion_load_stages": 1},
    "read-only": {"diffusion_read_only": True, "logprobs": 2},
    "constrained": {"diffusion_constrained": True, "logprob_token_ids": [1, 2]},
}
SETTLED_APART = {"a canvas of its own", "a prediction", "revealing"}
LONG_WORDS = "bad words of several tokens"
WAITED_FOR = {LONG_WORDS: {"bad_words": [[9], [10, 11], [12, 13, 14]]}}
"""The host reads the best guesses of these requests' canvases, see `denoise.bad_words`."""
WATCHED = {
    "watched": {"diffusion_feed": "feed"},
    "narrow and watched": {"diffusion_feed": "feed", "diffusion_canvas_length": 16},
}
ALL = REQUESTS | WAITED_FOR | WATCHED


class Server(NamedTuple):
    """What vLLM's runner has of a model on a GPU, as far as steps go."""

    state: DiffusionModelState
    sampler: DiffusionSampler
    req_states: RequestState

    def admit(self, *kinds: str) -> None:
        for kind in kinds:
            self.req_states.add_request(kind, PROMPT, list(range(PROMPT)), 0, 100)
            slot = self.req_states.req_id_to_index[kind]
            asked = dict(ALL[kind])
            # As on any server that has metrics.
            carried = {"is_counted": True, "canvas_feed": asked.pop("diffusion_feed", None)}
            made = worker.params(carried=carried, **{"max_tokens": 100, "seed": None} | asked)
            self.sampler.add_request(slot, made)
        self.req_states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def leave(self) -> None:
        for kind in list(self.req_states.req_id_to_index):
            self.state.remove_request(kind)
            self.req_states.remove_request(kind)

    def capture(self, most: int) -> None:
        """As vLLM does when it has captured the forward of steps of `most` canvases."""
        config = self.state.vllm_config
        config.compilation_config = SimpleNamespace(
            max_cudagraph_capture_size=most * self.state.step.canvas_length, cudagraph_mode=None
        )
        buffers: Any = SimpleNamespace(
            input_ids=torch.empty(4096, dtype=torch.int32, device=CUDA),
            seq_lens=torch.empty(self.state.max_num_reqs, dtype=torch.int32, device=CUDA),
        )
        nothing: Any = None
        self.state.capture_inner_cudagraphs(buffers, nothing, nothing, nothing)

    def step(self) -> None:
        batch = self.batch()
        self.state.prepare_inputs(batch, self.req_states)
        self.state.prepare_attn(batch, CUDAGraphMode.NONE, (), None, [], None)
        dtype = self.state.model_config.dtype
        hidden = torch.empty(batch.num_tokens, H, dtype=dtype, device=CUDA)
        source = hidden
        if not self.state.step.reads_hidden_states:
            source = torch.empty(batch.num_tokens, self.req_states.vocab_size, device=CUDA)
        self.sampler(source, batch)

    def batch(self) -> Any:
        rows = {
            kind: ALL[kind].get("diffusion_canvas_length", C)
            for kind in self.req_states.req_id_to_index
        }
        return input_batch(rows, self.req_states)


@pytest.fixture(params=VOCABULARIES)
def server(cuda: FakeCuda, request: pytest.FixtureRequest) -> Server:
    return start(cuda, VOCABULARIES[request.param])


def start(
    cuda: FakeCuda, vocab_size: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> Server:
    """After its first request, for which some things are made once and for all."""
    model = Model(torch.empty(vocab_size, H, dtype=dtype, device=CUDA))
    model.config.hidden_size = H
    model.embed_input_ids = lambda ids: torch.empty(len(ids), H, dtype=dtype, device=CUDA)
    model.self_conditioning = self_conditioning(dtype)
    vllm_config = config(dtype, vocab_size=vocab_size, settings=settings)
    state = DiffusionModelState.__new__(DiffusionModelState)
    state._inputs_embeds = torch.zeros(4096, H, dtype=dtype, device=CUDA)
    sampler, req_states = place(state, vllm_config, model)
    made = Server(state, sampler, req_states)
    made.admit("plain")
    made.step()
    made.leave()
    cuda.forget()
    return made


def place(
    state: DiffusionModelState, vllm_config: Any, model: Model
) -> tuple[DiffusionSampler, RequestState]:
    """Gives a state, its sampler and its requests to a model, as vLLM's runner does on a GPU."""
    vocab_size = vllm_config.model_config.get_vocab_size()
    req_states = RequestState(R, 512, 4096, C, vocab_size, CUDA)
    state.vllm_config, state.model_config = vllm_config, vllm_config.model_config
    state.model, state.device, state.dtype = model, CUDA, vllm_config.model_config.dtype
    state.max_num_tokens, state.max_num_reqs, state._latest_metadata = 4096, R, None
    state._causal = torch.zeros(2 * R, dtype=torch.int32, device=CUDA)
    state._symmetric = torch.zeros_like(state._causal)
    stock = SimpleNamespace(
        req_states=req_states,
        sampling_states=SamplingStates(R, vocab_size),
        logprobs_mode="raw_logprobs",
    )
    return state.custom_sampler(stock)[0], req_states


def self_conditioning(dtype: torch.dtype) -> Any:
    def linear(width: int, out_width: int) -> Any:
        weight = torch.empty(out_width, width, dtype=dtype, device=CUDA)
        return lambda rows: F.linear(rows, weight)

    norm = SimpleNamespace(weight=torch.empty(H, dtype=dtype, device=CUDA), variance_epsilon=1e-6)
    return SimpleNamespace(
        pre_norm=norm,
        post_norm=norm,
        gate_proj=linear(H, 2 * H),
        up_proj=linear(H, 2 * H),
        down_proj=linear(2 * H, H),
    )


def config(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    return worker.config(hidden_size=H, canvas_length=C, context=512, dtype=dtype, **sizes)


def input_batch(rows: dict[str, int], req_states: RequestState, *, prefills: bool = False) -> Any:
    """vLLM's, of requests that are all in their prefill, or none."""
    lengths = np.array(list(rows.values()), dtype=np.int32)
    slots = np.array([req_states.req_id_to_index[each] for each in rows], dtype=np.int32)
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
        # With asynchronous scheduling the canvas in flight may have been accepted.
        seq_lens_cpu_upper_bound=torch.from_numpy(lengths if prefills else PROMPT + 2 * lengths),
        prefill_len_np=np.full(len(rows), PROMPT, dtype=np.int32),
        idx_mapping_np=slots,
        idx_mapping=on_device(slots.shape),
        logits_indices=on_device(int(canvas_ends[-1]), torch.int64),
        input_ids=on_device(total, torch.int64),
        positions=on_device(total, torch.int64),
    )


@pytest.mark.parametrize("kind", REQUESTS)
def test_nobody_waits_for_a_request(server: Server, cuda: FakeCuda, kind: str) -> None:
    server.admit("plain", kind) if kind != "plain" else server.admit(kind)
    assert cuda.waits == [], "when it comes"
    assert any("slots.py" in place for place in cuda.copies)
    for _ in range(3):
        server.step()
    assert cuda.waits == [], "in its steps"


def test_nobody_waits_for_those_who_watch(
    server: Server, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of their canvases are under way when the step is over; a thread waits for them."""
    sent: list[Any] = []
    sender = SimpleNamespace(send_step=sent.append)
    monkeypatch.setattr(observers, "find_socket", lambda feed: (Path(feed), b"topic"))
    monkeypatch.setattr(observers, "CanvasSender", lambda: sender)
    server.admit("plain", "watched", "narrow and watched")
    for _ in range(3):
        server.step()
    assert cuda.waits == []
    assert len(sent) == 3
    for step in sent:
        assert all(column.device.type == "cpu" and len(column) == 2 for column in step.canvases)
    sent[0].wait()
    assert len(cuda.waits) == 1 and cuda.waits[0].startswith("an event")


def test_bad_words_of_several_tokens_alone_are_waited_for(server: Server, cuda: FakeCuda) -> None:
    server.admit("plain", LONG_WORDS)
    assert cuda.waits == [], "when it comes"
    server.step()
    places = {wait.rsplit(" at ", 1)[1].split(":")[0] for wait in cuda.waits}
    assert places == {f"vllm_dllm/denoise/{file}.py" for file in ("bad_words", "logit_rules")}


@pytest.mark.parametrize(
    "settings",
    [{"self_conditioning_tolerance": 0.01}, {"self_conditioning_top_k": 16}],
    ids=lambda settings: next(iter(settings)),
)
def test_cheaper_self_conditioning_waits_for_nothing(
    cuda: FakeCuda, settings: dict[str, Any]
) -> None:
    server = start(cuda, VOCABULARIES["streamed"], **settings)
    server.admit("plain", "penalties")
    for _ in range(3):
        server.step()
    assert cuda.waits == []


def test_a_busy_step_waits_for_nothing(cuda: FakeCuda) -> None:
    stages = [{"canvases": 2, "stability_threshold": 0}]
    server = start(cuda, VOCABULARIES["streamed"], load_stages=stages)
    server.admit("plain", "under load")
    server.step()
    cuda.copies.clear()
    server.step()
    assert cuda.copies == [] and cuda.waits == []


def test_a_steady_step_copies_nothing_to_the_device(server: Server, cuda: FakeCuda) -> None:
    server.admit("plain", "seeded", "greedy", "symmetric", "revealing")
    server.step()
    cuda.copies.clear()
    server.step()
    assert cuda.copies == [] and cuda.waits == []


def test_beside_whole_rows_a_steady_step_copies_only_where_rows_are(
    server: Server, cuda: FakeCuda
) -> None:
    """Penalties and biases want the logits of whole rows. Where the vocabulary is streamed, these
    are read on their own: two copies a step, which nobody waits for."""
    server.admit("plain", "seeded", "penalties", "bias")
    server.step()
    cuda.copies.clear()
    server.step()
    streams = server.state.step.model.streams_vocabulary
    assert len(cuda.copies) == (2 if streams else 0) and cuda.waits == []
    assert all(
        place.startswith("vllm_dllm/step/logits/streamed_logits.py") for place in cuda.copies
    )


def test_requests_that_come_together_are_copied_together(server: Server, cuda: FakeCuda) -> None:
    """The rules of one, or of many: the same number of copies."""
    kinds = ("bias", "allowed", "early stops", "bad words", LONG_WORDS, "penalties")
    copies = []
    for admitted in (kinds[:1], kinds):
        server.admit(*admitted)
        copies.append(len([p for p in cuda.copies if p.startswith("vllm_dllm/step/")]))
        server.leave()
        cuda.copies.clear()
    assert copies[0] == copies[1]


def test_the_vocabulary_is_read_by_our_kernel(server: Server, cuda: FakeCuda) -> None:
    server.admit("plain")
    server.step()
    streams = server.state.step.model.streams_vocabulary
    for kernel in ("_read_blocks_kernel", "_join_blocks_kernel", "_weigh_kernel"):
        assert (kernel in cuda.launches) == streams


@pytest.mark.parametrize("kind", REQUESTS)
def test_one_kernel_settles_plain_requests(server: Server, cuda: FakeCuda, kind: str) -> None:
    server.admit("seeded", kind) if kind != "seeded" else server.admit(kind)
    cuda.launches.clear()
    server.step()
    assert ("_settle_kernel" in cuda.launches) == (kind not in SETTLED_APART)
    assert "_temperature_and_noise_kernel" in cuda.launches


def test_what_waits_is_seen(cuda: FakeCuda) -> None:
    """That the tests above can fail."""
    there, here = torch.zeros(4, device=CUDA), torch.ones(4)
    there.sum().item()
    there.cpu()
    here.to(CUDA)
    here.to(CUDA, non_blocking=True)
    torch.tensor([1, 2], device=CUDA)
    there.copy_(here)
    there[torch.tensor([0, 1])] += 1
    with pytest.raises(Exception, match="nonzero"):
        there.nonzero()
    expected = [
        "item()",
        "a copy to the host",
        "a copy to the device",
        "a copy from memory that is not pinned",
        "a copy to the device",
        "a copy to the device",
        "CPU and CUDA tensors mixed by aten.index.Tensor",
        "CPU and CUDA tensors mixed by aten.index_put_.default",
        "a shape that depends on values, of aten.nonzero.default,",
    ]
    assert [wait.rsplit(" at ", 1)[0] for wait in cuda.waits] == expected
    assert all("test_step.py" in wait for wait in cuda.waits)
