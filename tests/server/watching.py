"""A client that watches the canvases of its own answer."""

from typing import Any

from tests.server.conftest import KEY, Server

CANVASES = {"diffusion_stream_canvases": True}


def watch(
    server: Server,
    question: str,
    name: str,
    key: str = KEY,
    rank: int | None = None,
    **options: Any,
) -> tuple[str, list[Any]]:
    """The answer, and the canvases that came with it. `name`: of the request; `rank`: of the engine
    that answers, None: whichever vLLM chooses."""
    headers = {"X-Request-Id": name, "Authorization": f"Bearer {key}"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    asked = {"max_tokens": 128, "seed": 1, "stream": True, **options}
    xargs = {"vllm_xargs": CANVASES}
    chunks = list(server.chat(question, extra_body=xargs, extra_headers=headers, **asked))
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{name}"}
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    events: list[Any] = [chunk for chunk in chunks if chunk.object == "vllm_dllm.canvas"]
    for event in events:
        assert event.choices == [] and event.model == server.model
        assert event.model_extra.keys() == {"canvas"}
    return text, [event.canvas for event in events]
