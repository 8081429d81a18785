"""What a client sees: completions, chat, streaming, stopping, log-probabilities, dLLM options."""

import math

from tests import tolerances
from tests.server.conftest import CANVAS, Server

QUESTION = "Reverse: rose chair lamp"


def test_streaming_gives_a_delta_per_committed_block(server: Server) -> None:
    stream = server.client.completions.create(
        model=server.model,
        prompt="Count from 10 to 80.",
        max_tokens=3 * CANVAS,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    blocks = [chunk.choices[0].token_ids for chunk in stream if chunk.choices[0].token_ids]
    assert [len(block) for block in blocks] == [CANVAS] * 3


def test_stream_and_whole_answer_agree(server: Server) -> None:
    whole = server.chat(QUESTION, seed=3, max_tokens=128).choices[0].message.content
    stream = server.chat(QUESTION, seed=3, max_tokens=128, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_stop_string(server: Server) -> None:
    full = server.chat("Count from 10 to 30.", seed=1, max_tokens=128).choices[0].message.content
    stop = full[len(full) // 2 :][:3]
    answer = server.chat("Count from 10 to 30.", seed=1, max_tokens=128, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == full[: full.index(stop)]


def test_logprobs(server: Server) -> None:
    answer = server.chat(QUESTION, logprobs=True, top_logprobs=3, max_tokens=2 * CANVAS)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # A committed token is the model's best guess.
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + tolerances.total(20)


def test_every_kernel_of_a_step_is_native(server: Server) -> None:
    server.chat(QUESTION, max_tokens=2 * CANVAS, logprobs=True, top_logprobs=2)
    server.chat(QUESTION, max_tokens=CANVAS, extra_body={"top_k": 5, "top_p": 0.9})
    assert "runs in Triton's interpreter" not in server.log.read_text()


def test_n(server: Server) -> None:
    odd = "kq 7 {w: 3 zx"  # unlike anything it was trained on: the answer depends on the noise
    noisy = {"diffusion_max_steps": 3, "diffusion_t_min": 1.0, "diffusion_t_max": 2.0}
    options = {"extra_body": {"vllm_xargs": noisy}, "max_tokens": CANVAS}
    several = [c.message.content for c in server.chat(odd, seed=1, n=4, **options).choices]
    each = [server.chat(odd, seed=1 + i, **options).choices[0].message.content for i in range(4)]
    assert several == each and len(set(several)) > 1
