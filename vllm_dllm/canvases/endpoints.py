"""Adds the routes of canvases to vLLM's API server. vLLM loads this file through the entry point
`vllm.endpoint_plugins` if the environment names it: `VLLM_PLUGINS=vllm_dllm_canvas`."""

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from vllm.config import ModelConfig
from vllm.logger import init_logger

from vllm_dllm.canvases.hub import CanvasHub
from vllm_dllm.canvases.middleware import CanvasSource, CanvasStreams, TokenTexts
from vllm_dllm.config import canvas_feeds
from vllm_dllm.config.architectures import FAMILIES, takes_acceptance
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.requests.options import ACCEPTANCE_RULES

logger = init_logger(__name__)

PAGE = Path(__file__).parent / "page"
START = Path(__file__).parent / "start" / "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # Nothing from elsewhere, and nothing that an answer could make the page run.
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

EXAMPLES_OF_SHIPPED = (
    "Sort: o r n i a z l v",
    "Count from 34 to 59.",
    "Reverse: sand rose seed cherry eagle fox bridge cloud",
)
EXAMPLES = (
    "Write a poem of four lines about the sea.",
    "Why is the sky blue? Explain it to a child.",
    "Write a Python function that tells whether a word is a palindrome.",
)
_SMALL_VOCABULARY = 1024  # the shipped checkpoints have half as many tokens


class CanvasEndpoints:
    """Implements vLLM's interface of endpoint plugins: the page, its files, canvases in streams."""

    name = canvas_feeds.PLUGIN
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._source: CanvasSource | None = None
        self._about: dict[str, Any] = {}  # what the page needs to know of the model

    def attach_router(self, app: FastAPI) -> None:
        """Adds the canvas middleware, the start page `/` and the routes below `/canvas` to `app`.
        vLLM calls it before it adds its own middleware, and before `init_state`."""
        # Added before vLLM's own layers, so inside of them: vLLM has checked the API key by then.
        app.add_middleware(CanvasStreams, source=lambda: self._source)

        async def redirect() -> Response:
            return RedirectResponse("canvas/")

        async def describe_model() -> Response:
            return JSONResponse(self._about, headers=_HEADERS)

        app.add_api_route("/", _serve_file(START), include_in_schema=False)
        app.add_api_route("/canvas", redirect, include_in_schema=False)
        app.add_api_route("/canvas/about.json", describe_model, include_in_schema=False)
        for file in sorted(PAGE.iterdir()):
            name = "" if file.name == "index.html" else file.name
            app.add_api_route(f"/canvas/{name}", _serve_file(file), include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Prepares for requests that ask for canvases. vLLM calls it once the engine runs. Does
        nothing if the server has no diffusion model or no folder for the canvas socket."""
        folder = canvas_feeds.socket_folder()
        if engine_client is None or not engine_client.model_config.is_diffusion or folder is None:
            return
        config: ModelConfig = engine_client.model_config
        texts = make_token_texts(engine_client.renderer.tokenizer)
        self._source = CanvasHub(folder), texts, config.served_model_name
        additional = engine_client.vllm_config.additional_config
        blocks = ExtensionConfig.from_additional_config(additional).blocks_in_flight
        family = next((FAMILIES[name] for name in config.architectures if name in FAMILIES), None)
        is_shipped = config.get_vocab_size() < _SMALL_VOCABULARY
        self._about = {
            "examples": EXAMPLES_OF_SHIPPED if is_shipped else EXAMPLES,
            "acceptance": [
                rule for rule in ACCEPTANCE_RULES if takes_acceptance(family, rule, blocks)
            ],
        }
        logger.info(
            "Canvases can be watched on %s, and with diffusion_stream_canvases in requests.",
            page_address(args),
        )


def make_token_texts(tokenizer: Any) -> TokenTexts:
    """Returns a function that decodes the tokens of a canvas one by one. It decodes each token once
    and caches the text for the life of the process. The text of a special token is empty, and that
    of a part of a character is U+FFFD. Without a tokenizer (--skip-tokenizer-init) all are
    empty."""
    if tokenizer is None:
        return lambda tokens: [""] * len(tokens)

    @functools.cache
    def text(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=True)

    return lambda tokens: [text(token) for token in tokens]


def page_address(args: Namespace) -> str:
    """Returns the page's URL for a browser on this machine, by the arguments of `vllm serve`. If
    the server listens on a Unix socket, returns the path alone."""
    if args.uds:
        return "/canvas"
    host = "127.0.0.1" if args.host in (None, "", "0.0.0.0", "::") else args.host
    scheme = "https" if args.ssl_certfile else "http"
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{args.port}{args.root_path or ''}/canvas"


def _serve_file(file: Path) -> Any:
    """Returns an endpoint that answers with a file. The file's suffix must be in `MEDIA_TYPES`."""

    async def serve() -> Response:
        return FileResponse(file, media_type=MEDIA_TYPES[file.suffix], headers=_HEADERS)

    return serve
