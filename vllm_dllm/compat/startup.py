"""Where vLLM's start begins, where it can fail, and which class adjusts its configuration."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_dllm.compat.patching import is_server, put, replace


def at_start(check: Callable[[EngineArgs], None], complete: Callable[[VllmConfig], None]) -> None:
    """`check` sees an engine's arguments before vLLM looks for the model, `complete` the
    configuration that comes of them, and may change it. Repeatable."""

    def make(stock: Any) -> Any:
        def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
            check(self)
            config: VllmConfig = stock(self, *args, **kwargs)
            complete(config)
            return config

        return create_engine_config

    replace("engine.arg_utils:EngineArgs.create_engine_config", make)


def on_bind_error(explain: Callable[[str, int, OSError], str]) -> None:
    """A server that cannot listen ends with what `explain` says of its host, port and the error,
    and without a traceback. Repeatable, and nothing in a process that is no server."""
    if not is_server():
        return

    def make(stock: Any) -> Any:
        def create_server_socket(addr: tuple[str, int], **kwargs: Any) -> Any:
            try:
                return stock(addr, **kwargs)
            except OSError as error:
                raise SystemExit(explain(*addr, error)) from None

        return create_server_socket

    replace("entrypoints.launchers.launcher:create_server_socket", make)


def set_serving_config(architecture: str, serving_config: type) -> None:
    """Makes `serving_config`, a VerifyAndUpdateConfig, adjust vLLM's configuration for models of
    `architecture`."""
    put("model_executor.models.config:MODELS_CONFIG_MAP", architecture, serving_config)
