"""What vLLM's API server loads, because of the entry point `vllm.endpoint_plugins`, where the
environment names it: `VLLM_PLUGINS=vllm_dllm,vllm_dllm_canvas`."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from vllm.logger import init_logger

from vllm_dllm.canvases.about import about
from vllm_dllm.canvases.hub import CanvasHub
from vllm_dllm.canvases.middleware import CanvasStreams
from vllm_dllm.canvases.texts import TokenTexts
from vllm_dllm.config import canvas_feeds

logger = init_logger(__name__)

PAGE = Path(__file__).parent / "page"
START = Path(__file__).parent / "start" / "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # Nothing from elsewhere, and nothing that an answer could make the page run.
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class CanvasEndpoints:
    name = "vllm_dllm_canvas"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._source: tuple[CanvasHub, TokenTexts] | None = None
        self._about: dict[str, Any] = {}

    def attach_router(self, app: FastAPI) -> None:
        # Added before vLLM's own layers, so inside of them: whoever comes here has shown the key.
        app.add_middleware(CanvasStreams, source=lambda: self._source)

        async def redirect() -> Response:
            return RedirectResponse("canvas/")

        async def tell() -> Response:
            return JSONResponse(self._about, headers=_HEADERS)

        app.add_api_route("/", _serve(START), include_in_schema=False)
        app.add_api_route("/canvas", redirect, include_in_schema=False)
        app.add_api_route("/canvas/about.json", tell, include_in_schema=False)
        for file in sorted(PAGE.iterdir()):
            name = "" if file.name == "index.html" else file.name
            app.add_api_route(f"/canvas/{name}", _serve(file), include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Ready to watch, if this is a server of a diffusion model."""
        folder = canvas_feeds.folder()
        if engine_client is None or not engine_client.model_config.is_diffusion or folder is None:
            return
        self._source = CanvasHub(folder), TokenTexts(engine_client.get_tokenizer())
        self._about = about(engine_client.model_config)
        logger.info(
            "Canvases can be watched on %s, and with diffusion_stream_canvases in requests.",
            page_address(args),
        )


def page_address(args: Namespace) -> str:
    """Where a browser on this machine finds the page of a server that was started with `args`."""
    if args.uds:
        return "/canvas"
    host = "127.0.0.1" if args.host in (None, "", "0.0.0.0", "::") else args.host
    scheme = "https" if args.ssl_certfile else "http"
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{args.port}{args.root_path or ''}/canvas"


def _serve(file: Path) -> Any:
    async def serve() -> Response:
        return FileResponse(file, media_type=TYPES[file.suffix], headers=_HEADERS)

    return serve
