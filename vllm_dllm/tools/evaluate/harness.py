"""Runs one task of lm-evaluation-harness against one server, and times it."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import lm_eval
import requests
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.errors import InputError
from vllm_dllm.tools.evaluate.tasks import task_manager
from vllm_dllm.tools.server_process import HOST

APIS = {"chat": "chat/completions", "completions": "completions"}
ANSWER_SECONDS = 3600  # that one answer may take


class _Client(LocalCompletionsAPI):
    """The harness's client of completions. It also calls `on_answer` after each answer. It adds up
    the `seconds` that all answers took, without the time for preparing prompts and scoring."""

    seconds = 0.0
    on_answer: Callable[[], None]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers to all requests, and adds the time that they took to `seconds`."""
        start = time.monotonic()
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            self.seconds += time.monotonic() - start

    def model_call(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().model_call(*args, **kwargs)
        self.on_answer()
        return answer

    async def amodel_call(self, *args: Any, **kwargs: Any) -> Any:
        answer = await super().amodel_call(*args, **kwargs)
        self.on_answer()
        return answer


class _ChatClient(_Client, LocalChatCompletion):
    """Does what `_Client` does for chat completions."""


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Says how `eval` and `tune` send the prompts of a task."""

    data: Path
    """Folder of data sets, each in a folder OWNER/NAME."""
    api: str
    """The API that prompts go through: "chat" or "completions"."""
    limit: int | None
    """Only so many prompts of a task are sent, from its first on; None: all prompts."""
    concurrency: int
    """The number of prompts that the server has at once."""
    serve_options: Sequence[str] | None
    """Further options for `vllm serve`; None: those that `serving.serve_options` chooses."""

    def check(self, least_prompts: int = 1) -> None:
        """Raises InputError for settings that cannot be used. A limit must be at least
        `least_prompts`."""
        for name, number, least in (
            ("limit", self.limit, least_prompts),
            ("concurrency", self.concurrency, 1),
        ):
            if number is not None and number < least:
                raise InputError(f"--{name} must be at least {least}, got {number}")
        if not self.data.is_dir():
            raise InputError(f"--data: there is no folder '{self.data}'")


@dataclass(frozen=True)
class Score:
    """One metric of a task's answers, over all prompts."""

    name: str
    """The names of the metric, and of the filter that extracted the answer from the text."""
    value: float
    stderr: float | None
    by_prompt: Mapping[int, object]
    """Index of a prompt in the task -> the metric's value for its answer, usually a number."""


@dataclass(frozen=True)
class Outcome:
    """The result of one task. `seconds` is the time from the first prompt to the last answer."""

    scores: list[Score]
    num_prompts: int
    seconds: float


def evaluate(
    task: Task,
    model: str,
    port: int,
    prompting: PromptSettings,
    *,
    log: Path,
    on_answer: Callable[[], None],
    prompts: Sequence[int] | None = None,
    options: Mapping[str, object] | None = None,
) -> Outcome:
    """Sends the task's prompts to the server, and returns the scores of the answers. Calls
    `on_answer` after each answer. The harness's output goes to the file `log`.

    `prompts` are the indices of the prompts to send; None: the first `limit` ones. `options` are
    `diffusion_*` keys for each request.

    Raises:
        InputError: the server does not answer.
    """
    client = (_ChatClient if prompting.api == "chat" else _Client)(
        base_url=f"http://{HOST}:{port}/v1/{APIS[prompting.api]}",
        model=model,
        tokenizer_backend=None,  # the server has one
        num_concurrent=prompting.concurrency,
        max_retries=1,  # our own server must not fail even once
        timeout=ANSWER_SECONDS,
        header={"Authorization": "Bearer none"},  # not a key from the environment
    )
    client.on_answer = on_answer
    config = json.loads((Path(model) / "config.json").read_text())
    # DiffusionGemma denoises at its own temperatures, so 1 replaces the 0 that tasks have for other
    # models. For masked models a task's parameters stay.
    is_masked = not FAMILIES.keys().isdisjoint(config.get("architectures") or ())
    sampling: dict[str, object] = {} if is_masked else {"temperature": 1.0}
    try:
        with log.open("a") as output, contextlib.redirect_stderr(output):
            found: Any = lm_eval.simple_evaluate(
                client,
                tasks=[task],
                limit=prompting.limit if prompts is None else None,
                samples=None if prompts is None else {task.task_name: list(prompts)},
                gen_kwargs=sampling | ({"vllm_xargs": dict(options)} if options else {}),
                apply_chat_template=prompting.api == "chat",
                task_manager=task_manager(False),
            )
    except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
        raise InputError(
            f"the server did not answer task '{task.task_name}' ({error}). See {log}"
        ) from error
    (name,) = found["results"]
    results = found["results"][name]
    higher_is_better = found["higher_is_better"][name]
    scores = []
    for key, value in results.items():
        metric, _, filter_name = key.partition(",")
        if metric not in higher_is_better:
            continue
        stderr = results.get(f"{metric}_stderr,{filter_name}")  # "N/A" for a single prompt
        judged = (one for one in found["samples"][name] if one["filter"] == filter_name)
        scores.append(
            Score(
                key.removesuffix(",none").replace(",", ", "),
                value,
                stderr if isinstance(stderr, float) else None,
                {sample["doc_id"]: sample.get(metric) for sample in judged},
            )
        )
    return Outcome(scores, found["n-samples"][name]["effective"], client.seconds)
