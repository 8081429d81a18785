"""Hooks of vLLM's start: its arguments and configuration, and a port that cannot be opened."""

import errno
import socket
import weakref
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import configure_logging_if_needed

from vllm_dllm.compat.log_lines import log_as_vllm_does
from vllm_dllm.compat.patching import set_entry, wrap


def set_config_hooks(
    check: Callable[[EngineArgs], None],
    complete: Callable[[VllmConfig], None],
    explain: Callable[[EngineArgs], None],
) -> None:
    """Patches vLLM's making of its configuration. `check` is called with an engine's arguments
    before vLLM looks for the model. `complete` is called with the configuration made from them,
    which it may change in place. Where vLLM refuses the arguments, `explain` is called with them,
    which may raise an error that says more. Logging is configured before all. Repeatable."""

    @wrap("engine.arg_utils:EngineArgs.create_engine_config")
    def create_engine_config(stock: Any, self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        configure_logging_if_needed(self.create_logging_config())
        log_as_vllm_does()
        check(self)
        try:
            config: VllmConfig = stock(self, *args, **kwargs)
        except ValueError:
            explain(self)
            raise
        complete(config)
        return config


def explain_bind_errors(explain: Callable[[str, int, OSError | OverflowError], str]) -> None:
    """Patches vLLM's opening of its port: a server that cannot listen ends with the line that
    `explain(host, port, error)` returns, without a traceback. Repeatable."""

    @wrap("entrypoints.launchers.launcher:create_server_socket")
    def create_server_socket(stock: Any, addr: tuple[str, int], *, reuse_port: bool) -> Any:
        try:
            bound: socket.socket = stock(addr, reuse_port=reuse_port)
            if not reuse_port and addr[1] != 0:
                _reserve(addr, bound)
            return bound
        except (OSError, OverflowError) as error:
            raise SystemExit(explain(*addr, error)) from None


def _reserve(addr: tuple[str, int], bound: socket.socket) -> None:
    """Reserves `addr` among servers of ours while there is the socket `bound`. Raises OSError if
    another has it. Linux lets two servers bind one port until one of them listens, minutes later,
    and uvloop drops the error of the other: it would say that it is ready and get no requests."""
    guard = socket.socket(socket.AF_UNIX)
    weakref.finalize(bound, guard.close)
    try:
        guard.bind(f"\0vllm_dllm {addr}".encode()[:100])  # no file; gone with its process
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise


def set_serving_config(architecture: str, serving_config: type) -> None:
    """Has the class `serving_config` check and adjust configurations of `architecture`."""
    set_entry("model_executor.models.config:MODELS_CONFIG_MAP", architecture, serving_config)
