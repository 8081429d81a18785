"""Runs one task of lm-evaluation-harness against one server, and times it."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import datasets
import lm_eval
import requests
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from vllm_dllm.config.architectures import DIFFUSION_GEMMA
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import read_json
from vllm_dllm.tools.evaluate.tasks import task_manager
from vllm_dllm.tools.scrape import Counters, read_metrics
from vllm_dllm.tools.server_process import HOST

APIS = {"chat": "chat/completions", "completions": "completions"}
ANSWER_SECONDS = 3600  # that one answer may take
HARNESS_LOG = "lm_eval.log"  # in the folder of a command's logs


def redirect_library_logs(logs: Path) -> None:
    """Writes what the libraries log to a file in the folder `logs`, and hides their progress bars,
    as long as this process lives."""
    handler = logging.FileHandler(logs / HARNESS_LOG)
    datasets.disable_progress_bars()
    for name in ("lm_eval", "lm-eval", "datasets"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False


class _Client(LocalCompletionsAPI):
    """The harness's client of completions. It also calls `on_answer` after each answer. It adds up
    the `seconds` that all answers took, without the time for preparing prompts and scoring."""

    seconds = 0.0
    on_answer: Callable[[], object]

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
    """Further options for `vllm serve`; None: those that `choose_serve_options` chooses."""

    def count_prompts(self, task: Task) -> int:
        """Returns how many prompts of a task are sent."""
        return min(len(task.eval_docs), self.limit or len(task.eval_docs))

    def check(self, least_prompts: int = 1) -> None:
        """Raises InputError for settings that cannot be used. A limit must be at least
        `least_prompts`."""
        if self.limit is not None and self.limit < least_prompts:
            raise InputError(f"--limit must be at least {least_prompts}, got {self.limit}")
        if self.concurrency < 1:
            raise InputError(f"--concurrency must be at least 1, got {self.concurrency}")
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
    """The result of one task."""

    scores: list[Score]
    num_prompts: int
    seconds: float  # from the first prompt to the last answer
    counters: Counters  # of the server meanwhile


def evaluate(
    task: Task,
    model: str,
    port: int,
    prompting: PromptSettings,
    *,
    logs: Path,
    on_answer: Callable[[], object] = lambda: None,
    prompts: Sequence[int] | None = None,
    options: Mapping[str, object] | None = None,
) -> Outcome:
    """Sends the task's prompts to the server of the checkpoint `model`, and returns the scores of
    the answers and what the server did. Calls `on_answer` after each answer. The harness's output
    goes to a file in the folder `logs`.

    `prompts` are the indices of the prompts to send; None: the first `limit` ones. `options` are
    `diffusion_*` keys for each request.

    Raises:
        InputError: the server does not answer.
    """
    log = logs / HARNESS_LOG
    before = read_metrics(port)
    client = _make_client(model, port, prompting, on_answer)
    sampling = _sampling_parameters(Path(model))
    try:
        with log.open("a") as output, contextlib.redirect_stderr(output):
            answered: Any = lm_eval.simple_evaluate(
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
    (name,) = answered["results"]
    return Outcome(
        scores=_read_scores(answered, name),
        num_prompts=answered["n-samples"][name]["effective"],
        seconds=client.seconds,
        counters=Counters.since(before, port),
    )


def _make_client(
    model: str, port: int, prompting: PromptSettings, on_answer: Callable[[], object]
) -> _Client:
    """Returns a client of the server at `port`, which calls `on_answer` after each answer."""
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
    return client


def _sampling_parameters(checkpoint: Path) -> dict[str, object]:
    """Returns the parameters of requests that replace a task's own. DiffusionGemma denoises at its
    own temperatures, so 1 replaces the 0 that tasks have for other models."""
    architectures = read_json(checkpoint / "config.json").get("architectures") or ()
    return {"temperature": 1.0} if DIFFUSION_GEMMA in architectures else {}


def _read_scores(answered: Any, name: str) -> list[Score]:
    """Returns the scores of the task `name` from the result of lm-evaluation-harness."""
    results = answered["results"][name]
    scores = []
    for key, value in results.items():
        metric, _, filter_name = key.partition(",")
        if metric not in answered["higher_is_better"][name]:
            continue
        stderr = results.get(f"{metric}_stderr,{filter_name}")  # "N/A" for a single prompt
        samples = (s for s in answered["samples"][name] if s["filter"] == filter_name)
        scores.append(
            Score(
                name=key.removesuffix(",none").replace(",", ", "),
                value=value,
                stderr=stderr if isinstance(stderr, float) else None,
                by_prompt={sample["doc_id"]: sample.get(metric) for sample in samples},
            )
        )
    return scores
