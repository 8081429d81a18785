"""Runs a server for the tasks of an evaluation or a tuning."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from lm_eval.api.task import Task
from rich.console import Console

from vllm_dllm.errors import InputError
from vllm_dllm.tools.evaluate.tasks import longest_answer
from vllm_dllm.tools.scrape import SERVER_ENVIRONMENT, SERVER_OPTIONS, post_json
from vllm_dllm.tools.server_process import ENDING_SECONDS, HOST, Server, choose_port, serve_command
from vllm_dllm.tools.terminal import wait_on_console

CONTEXT = 1024  # tokens; enough for held-out prompts and their answers


def serve_options(tasks: dict[str, Task], user_options: Sequence[str] | None) -> Sequence[str]:
    """Returns the options of `vllm serve`: `user_options`, or defaults if that is None. Raises
    InputError if their context leaves no room for the longest answer that a task asks for."""
    longest = max(tasks, key=lambda name: longest_answer(tasks[name]))
    tokens = longest_answer(tasks[longest])
    if user_options is None:
        return _default_options(tokens)
    context = re.search(r"--max-model-len[ =](\d+)(?!\S)", " ".join(user_options))
    if context and int(context[1]) <= tokens:
        raise InputError(
            f"task '{longest}' asks for answers of up to {tokens} tokens (max_gen_toks): "
            f"--max-model-len must leave room for them after the prompt, got {context[1]}. Raise "
            f"it, or lower max_gen_toks in a task file."
        )
    return user_options


def _default_options(longest_answer: int) -> list[str]:
    """Returns no options on a GPU. On a CPU, returns a limit of the KV cache, which by default
    takes most of the memory, and of the context. The context has room for answers of
    `longest_answer` tokens."""
    if torch.cuda.is_available():
        return []
    context = CONTEXT if longest_answer <= CONTEXT // 2 else longest_answer + CONTEXT
    return ["--max-model-len", str(context), "--kv-cache-memory-bytes", "1G"]


@contextmanager
def run_server(
    checkpoint: Path, options: Sequence[str], console: Console, logs: Path
) -> Iterator[int]:
    """Serves the checkpoint, with further `options` of `vllm serve`, for the length of a block.
    Yields the port once the server has answered a first request. Its log goes to the folder `logs`.
    Errors of the block are passed on.

    Raises:
        ServerError: the server did not start, or has ended when the first request or the block
            raises InputError.
        InputError: the first request failed.
    """
    port = choose_port(None)
    log = logs / f"{checkpoint.resolve().name}-{port}.log"
    console.print(f"Serving {checkpoint}, log: {log}", soft_wrap=True)
    command = serve_command(checkpoint, port, *SERVER_OPTIONS, *options)
    ask_without_proxy()
    with Server(command, port, log, SERVER_ENVIRONMENT) as server:
        seconds = wait_on_console(server, console)
        console.print(f"Ready after {seconds:.0f} s.")
        try:
            # So that the costs of its first request are not measured.
            first = {"model": str(checkpoint), "prompt": "Hello", "max_tokens": 16}
            post_json(port, "/v1/completions", first)
            yield port
        except InputError:
            server.check_alive(ENDING_SECONDS)  # raises, if that was the reason
            raise


def ask_without_proxy() -> None:
    """Lets this process ask servers on `HOST` directly, as long as it lives. The harness would ask
    a proxy, if the environment names one."""
    # Where both are set, `no_proxy` alone counts.
    inherited = os.environ.get("no_proxy", os.environ.get("NO_PROXY"))
    os.environ["no_proxy"] = ",".join(filter(None, (inherited, HOST)))
