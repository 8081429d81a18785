"""How a server of vLLM stops: requests in flight can finish, then get an error.

vLLM kills its engine, cancels the task that would have told the waiting requests, and then waits
for their connections to close (`docs/upstream/shutdown-hangs-clients.md`). Here the requests in
flight get the time that `--shutdown-timeout` gives them, then an error, and everything after that
has a limit of its own.
"""

import asyncio
import concurrent.futures
import multiprocessing
import os
import signal
import threading
import time
from http import HTTPStatus
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, RetryableRequestError
from vllm.logger import init_logger
from vllm.utils.async_utils import cancel_task_threadsafe
from vllm.utils.system_utils import kill_process_tree

from vllm_dllm.compat.drafting import has_dflash_method
from vllm_dllm.compat.log_lines import STOPPED
from vllm_dllm.compat.patching import wrap

logger = init_logger(__name__)

ENGINE_S = 4
"""Seconds that the engine's processes have to end by themselves."""
CONNECTIONS_S = 3
"""Seconds to send the last bytes of the answers, to clients that may not read them."""
ALL_S = 9
"""Seconds until the process is killed, counted from the end of the time for requests in flight."""
_STOPPING = "_vllm_dllm_stopping"


class ServerStopping(GracefulHTTPError, RetryableRequestError):
    """The error of a request that a stopping server ends: HTTP 503, logged without a traceback."""

    def __init__(self) -> None:
        super().__init__(
            "The server is stopping. Send the request again, to another server or after a restart.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


def stop_gracefully() -> None:
    """Patches vLLM's shutdown of servers of diffusion models and DFlash drafters. Requests in
    flight can finish or get an error, new ones get HTTP 503, and the server does not wait for
    clients that do not read. Repeatable."""

    @wrap("v1.engine.async_llm:AsyncLLM.shutdown")
    def shutdown(stock: Any, self: Any, timeout: float | None = None) -> None:
        """Lets requests in flight finish, at most for `timeout` seconds, unless that was done
        before or would block the event loop. Then gives the engine `ENGINE_S` to shut down."""
        # None: the engine is garbage-collected, or never started.
        if timeout is not None and _runs_diffusion_or_dflash(self.vllm_config):
            if not _in_event_loop() and not getattr(self, _STOPPING, False):
                setattr(self, _STOPPING, True)
                _stop_requests(self, timeout)
                # Nobody waits for outputs any more: an engine that has to be killed is no error.
                cancel_task_threadsafe(self.output_handler)
            timeout = ENGINE_S
        stock(self, timeout)

    @wrap("v1.engine.async_llm:AsyncLLM.check_admission")
    def check_admission(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses requests while the server stops."""
        if getattr(self, _STOPPING, False):
            raise ServerStopping
        stock(self, *args, **kwargs)

    @wrap("entrypoints.launchers.launcher:NoSignalServer.shutdown")
    async def close(stock: Any, self: Any, sockets: Any = None) -> None:
        """Waits at most `CONNECTIONS_S` for connections of vLLM's HTTP server."""
        engine = getattr(self.config.app.state, "engine_client", None)
        if engine is not None and _runs_diffusion_or_dflash(engine.vllm_config):
            self.config.timeout_graceful_shutdown = CONNECTIONS_S
        await stock(self, sockets)


def limit_interrupted_start() -> None:
    """Replaces this process' signal handlers, so that a server that is told to stop while it starts
    says so and ends, or is killed `ALL_S` later, whatever it waits for. Call it in the server's
    first process, before others are started. Does nothing in other processes and threads, and once
    the server listens."""
    stock: Any = signal.getsignal(signal.SIGTERM)
    # vLLM's, until it listens.
    is_starting = callable(stock) and getattr(stock, "__name__", "") == "_interrupt_init"
    is_first = multiprocessing.parent_process() is None
    if not (is_starting and is_first and threading.current_thread() is threading.main_thread()):
        return

    def end(number: int, frame: Any) -> None:
        _kill_after(ALL_S)
        # Not vLLM's KeyboardInterrupt: its `zmq_socket_ctx` drops that, and the start goes on.
        raise SystemExit(STOPPED)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def leave_signals_to_engine() -> None:
    """Makes a worker process ignore SIGINT and SIGTERM, which Ctrl-C and service managers send to
    all processes: requests in flight can finish, and the engine ends its workers. Does nothing
    elsewhere."""
    is_worker_process = multiprocessing.current_process().name.startswith("VllmWorker")
    if is_worker_process and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _runs_diffusion_or_dflash(config: VllmConfig) -> bool:
    """Whether the configured model is a diffusion model, or has a DFlash drafter."""
    return config.model_config.is_diffusion or has_dflash_method(config.speculative_config)


def _in_event_loop() -> bool:
    """Whether this thread runs the server's event loop, which waiting here would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _stop_requests(engine: Any, limit_s: float) -> None:
    """Waits up to `limit_s` seconds for the requests in flight, then ends the others with an error.
    Has this process killed `ALL_S` after that time. Must not be called in the event loop."""
    if engine.vllm_config.parallel_config._api_process_count > 1:
        # The parent of several API servers kills them when the time is over.
        limit_s = max(limit_s - CONNECTIONS_S - 1, 0)
    _kill_after(limit_s + ALL_S)
    processor, outputs = engine.output_processor, engine.output_handler
    if outputs is None or not processor.has_unfinished_requests():
        return
    logger.info(
        "Stopping. %d requests in flight get %d s to finish, new ones HTTP 503.",
        processor.get_num_unfinished_requests(),
        limit_s,
    )
    deadline = time.monotonic() + limit_s
    while processor.has_unfinished_requests() and time.monotonic() < deadline:
        if engine.errored:  # its requests have got the error
            return
        time.sleep(0.05)
    ended = asyncio.run_coroutine_threadsafe(_end_requests(engine), outputs.get_loop())
    concurrent.futures.wait([ended], timeout=1)


async def _end_requests(engine: Any) -> None:
    """Ends all unfinished requests of `engine`, vLLM's AsyncLLM, with ServerStopping."""
    if left := list(engine.output_processor.request_states):
        logger.warning("Stopping. %d requests did not finish in time and get an error.", len(left))
        engine.output_processor.propagate_error(ServerStopping())
        await engine.abort(left, internal=True)


def _kill_after(limit_s: float) -> None:
    """Starts a thread that kills this process and its children after `limit_s` seconds."""

    def kill() -> None:
        time.sleep(limit_s)
        logger.error("This process did not end in %d s and is killed.", limit_s)
        kill_process_tree(os.getpid())

    threading.Thread(target=kill, daemon=True, name="KillAfter").start()
