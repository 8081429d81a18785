"""Hooks of vLLM's start: its arguments and configuration, and a port that cannot be opened."""

import errno
import socket
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
            return bound if reuse_port or addr[1] == 0 else _ReservedSocket(bound)
        except (OSError, OverflowError) as error:
            raise SystemExit(explain(*addr, error)) from None


class _ReservedSocket(socket.socket):
    """A bound socket whose address no other server of ours gets until it is closed. Linux lets two
    servers bind one port until one of them listens, minutes later, and uvloop drops the error of
    the other: it would say that it is ready and get no requests."""

    def __init__(self, bound: socket.socket) -> None:
        """Takes over the file of `bound`. Raises OSError if another server has its address."""
        super().__init__(fileno=bound.detach())
        self._guard = socket.socket(socket.AF_UNIX)
        try:
            # An abstract address: no file, and gone with its process.
            self._guard.bind(f"\0vllm_dllm {self.getsockname()}".encode())
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise

    def close(self) -> None:
        self._guard.close()
        super().close()


def set_serving_config(architecture: str, serving_config: type) -> None:
    """Has the class `serving_config` check and adjust configurations of `architecture`."""
    set_entry("model_executor.models.config:MODELS_CONFIG_MAP", architecture, serving_config)
