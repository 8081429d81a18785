"""The plugin in vLLM's application: inside of what asks for the API key, and harmless elsewhere."""

import asyncio
import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from vllm_dllm.canvases.endpoints import (
    EXAMPLES,
    EXAMPLES_OF_SHIPPED,
    PAGE,
    CanvasEndpoints,
    make_token_texts,
    page_address,
)
from vllm_dllm.config.canvas_feeds import FEED

KEYS = ("first", "second")
BODY = {"prompt": "a", "stream": True, "vllm_xargs": {"diffusion_stream_canvases": True}}


class Tokenizer:
    all_special_ids = (0, 1)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens and len(ids) == 1
        return "" if ids[0] in self.all_special_ids else f"<{ids[0]}>"


def arguments(**address: Any) -> Namespace:
    """Of a server."""
    where = {"host": None, "port": 8000, "uds": None, "ssl_certfile": None, "root_path": ""}
    return Namespace(
        allowed_origins=["*"],
        allow_credentials=False,
        allowed_methods=["*"],
        allowed_headers=["*"],
        api_key=list(KEYS),
        enable_request_id_headers=False,
        middleware=[],
        **(where | address),
    )


def application(
    is_diffusion: bool = True,
    architecture: str = "SDARForCausalLM",
    vocab_size: int = 512,
    settings: dict[str, Any] | None = None,
) -> TestClient:
    """With the middleware that vLLM puts around a plugin's, and a route that shows what it got."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.body()
        return StreamingResponse(iter([b"data: " + body + b"\n\n"]), media_type="text/event-stream")

    plugin = CanvasEndpoints()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    args = arguments()
    init_entrypoints_middleware(args, app, ())
    model_config = SimpleNamespace(
        is_diffusion=is_diffusion,
        served_model_name="served",
        architectures=[architecture],
        get_vocab_size=lambda: vocab_size,
    )
    config = SimpleNamespace(additional_config={"vllm_dllm": settings or {}})
    renderer = SimpleNamespace(tokenizer=Tokenizer())
    engine = SimpleNamespace(model_config=model_config, vllm_config=config, renderer=renderer)
    asyncio.run(plugin.init_state(engine, app.state, args))
    return TestClient(app)


def extra_of(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200
    return json.loads(answer.text.removeprefix("data: "))["vllm_xargs"]


@pytest.mark.slow
def test_every_key_has_feeds_of_its_own(folder: Path) -> None:
    with application() as client:
        for key in KEYS * 2:
            headers = {"Authorization": f"Bearer {key}"}
            answers = [client.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
            feeds = [extra_of(answer)[FEED] for answer in answers]
            assert len(set(feeds)) == 2


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer third"}], ids=["no", "wrong"])
def test_without_the_key(folder: Path, headers: dict[str, str]) -> None:
    with application() as client:
        assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 401
    assert not list(folder.iterdir()), "nobody listens"


def test_a_model_that_has_no_canvases(folder: Path) -> None:
    with application(is_diffusion=False) as client:
        headers = {"Authorization": "Bearer first"}
        answer = client.post("/v1/completions", json=BODY, headers=headers)
        assert extra_of(answer) == BODY["vllm_xargs"]


def test_the_page_needs_no_key_and_names_no_other_host() -> None:
    with application() as client:
        page = client.get("/canvas")
        assert page.status_code == 200 and page.url.path == "/canvas/"
        for file in PAGE.iterdir():
            name = "" if file.name == "index.html" else file.name
            answer = client.get(f"/canvas/{name}")
            assert answer.content == file.read_bytes()
            assert "//" not in answer.text.replace("// ", "").replace("</", ""), "an address"
            assert "innerHTML" not in answer.text


def test_the_start_page_links_to_what_is_there() -> None:
    with application() as client:
        page = client.get("/").text
        links = set(re.findall(r'href="(?!data:)([^"]+)"', page))
        ours = {"canvas/", "canvas/canvas.css"}
        assert links - ours == {"v1/models", "docs", "metrics", "health"}  # vLLM's
        assert all(client.get(f"/{link}").status_code == 200 for link in ours)


@pytest.mark.parametrize(
    ("architecture", "vocab_size", "in_flight", "examples", "special_rules"),
    [
        ("SDARForCausalLM", 512, 1, EXAMPLES_OF_SHIPPED, {"in_order"}),
        ("SDARForCausalLM", 512, 2, EXAMPLES_OF_SHIPPED, {"in_order", "verified"}),
        ("Fast_dLLM_QwenForCausalLM", 151_936, 1, EXAMPLES, {"in_order", "verified"}),
        ("DiffusionGemmaForBlockDiffusion", 262_144, 1, EXAMPLES, set()),
    ],
)
def test_the_page_offers_what_the_model_can_do(
    folder: Path,
    architecture: str,
    vocab_size: int,
    in_flight: int,
    examples: tuple[str, ...],
    special_rules: set[str],
) -> None:
    settings = {"blocks_in_flight": in_flight}
    with application(architecture=architecture, vocab_size=vocab_size, settings=settings) as client:
        told = client.get("/canvas/about.json").json()
    assert told["examples"] == list(examples)
    assert set(told["acceptance"]) & {"in_order", "verified"} == special_rules


@pytest.mark.parametrize(
    ("address", "page"),
    [
        ({}, "http://127.0.0.1:8000/canvas"),
        ({"host": "0.0.0.0", "port": 8001}, "http://127.0.0.1:8001/canvas"),
        ({"uds": "/tmp/s"}, "/canvas"),
        ({"host": "::1"}, "http://[::1]:8000/canvas"),
        (
            {"host": "a.example", "ssl_certfile": "c", "root_path": "/x"},
            "https://a.example:8000/x/canvas",
        ),
    ],
)
def test_where_the_page_is(address: dict[str, Any], page: str) -> None:
    assert page_address(arguments(**address)) == page


def test_texts() -> None:
    texts = make_token_texts(Tokenizer())
    assert texts([5, 0, 5, 9]) == ["<5>", "", "<5>", "<9>"]
    assert make_token_texts(None)([5, 0]) == ["", ""]  # --skip-tokenizer-init
