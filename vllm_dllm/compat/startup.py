"""Where vLLM's start can fail."""

import sys
from collections.abc import Callable
from typing import Any

from vllm.engine.arg_utils import EngineArgs


def check_engine_arguments(check: Callable[[EngineArgs], None]) -> None:
    """`check` sees an engine's arguments before vLLM looks for the model. Repeatable."""
    if EngineArgs.create_engine_config.__module__ == __name__:
        return
    stock_create_engine_config = EngineArgs.create_engine_config

    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return stock_create_engine_config(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def explain_unusable_address(explain: Callable[[str, int, OSError], str]) -> None:
    """A server that cannot listen ends with what `explain` says of its host, port and the error,
    and without a traceback. Repeatable, and nothing in a process that is no server."""
    launcher: Any = sys.modules.get("vllm.entrypoints.launchers.launcher")
    if launcher is None or launcher.create_server_socket.__module__ == __name__:
        return
    stock_create_server_socket = launcher.create_server_socket

    def create_server_socket(addr: tuple[str, int], **kwargs: Any) -> Any:
        try:
            return stock_create_server_socket(addr, **kwargs)
        except OSError as error:
            raise SystemExit(explain(*addr, error)) from None

    launcher.create_server_socket = create_server_socket
